"""The vocabulary of the synthetic documents: plain lists, so that a seed gives the same text anywhere."""

ADJECTIVES = """amber azure brisk bronze calm cedar clever copper coral crimson crystal dusty early
eager ember faded fierce floral frosty gentle gilded golden grand hazel hidden hollow humble icy indigo
ivory jade jolly keen late lemon lilac little lively lone lucky lunar maple marble mellow merry misty
modest mossy narrow noble olive opal pale patient pearl plain polar proud quiet rapid raven rosy royal
ruby rustic sandy scarlet secret shady silent silver sleepy slender smoky solar steady stormy sunny swift
tall teal tender tidy tiny velvet violet vivid wandering warm weary wild winter wise witty wooden young""".split()

NOUNS = """anchor arrow badger bakery barrel basket beacon bison bridge brook cabin candle canyon
castle cellar cherry cliff clock comet condor coyote crane creek dolphin dragon eagle engine falcon
ferry finch forest fountain fox galaxy garden glacier goose harbor harvest hawk heron hill horse island
jaguar journal kettle kite ladder lagoon lantern leopard library lion lobster lynx magnet mammoth
market meadow mill mirror moose museum needle oak ocean orchard otter owl panda panther parrot pebble
pelican phoenix piano pigeon pilot planet pond puma quarry rabbit raven river robin rocket saddle salmon
seal shadow shelter spider stable station stone stork summit swan temple thistle tiger tower trout tunnel
turtle valley vessel village violin walnut walrus whale willow window wolf wren zebra""".split()

PEOPLE = """Alice Ben Carla David Elena Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olga Peter
Quinn Rosa Simon Tara Ursula Victor Wendy Xavier Yara Zoe""".split()

PLACES = """market harbor office station garden school theater bakery workshop warehouse library
kitchen courtyard museum hospital airport farm village valley mountain river bridge square park""".split()

THINGS = """report letter package ticket basket bicycle camera chair contract coat door engine
envelope folder hammer invoice jacket key ladder lamp map notebook painting pencil phone printer radio
schedule table umbrella wagon window""".split()

VERBS = """carried checked cleaned collected delivered described examined fixed found kept left lost
moved opened ordered painted repaired returned sold sorted stored turned visited weighed wrapped""".split()

QUALITIES = """bright broken busy careful cheap clean cold curious empty famous fresh full heavy
large light loud modern new old open quick ready simple small soft strange strong useful warm wet""".split()

TIMES = (
    "in the morning|in the evening|at noon|after lunch|before sunrise|late at night|on Monday|on Tuesday|"
    "on Friday|last week|last year|in spring|in the winter|during the storm|every summer|two days later"
).split("|")

FILLER_TEMPLATES = (
    "{person} {verb} the {quality} {thing} {time}.",
    "The {quality} {thing} was left near the {place} {time}.",
    "Nobody at the {place} had seen such a {quality} {thing} before.",
    "{person} and {person2} walked to the {place} and talked about the {thing}.",
    "It was {quality} and {quality2} at the {place} {time}.",
    "When {person} came to the {place}, the {thing} was already {quality}.",
    "{person} said that the {place} would be {quality} {time}.",
    "They {verb} the {thing}, then {verb2} the {thing2} behind the {place}.",
    "The road from the {place} to the {place2} is {quality} {time}.",
    "Most people think that a {quality} {thing} is better than a {quality2} one.",
    "There were {number} chairs and {number2} lamps in the {place}.",
    "{person} bought a {thing} for {number} coins and {verb} it {time}.",
    "The {adjective} {noun} slept beside the {place} {time}.",
    "Some say that the {adjective} {noun} once {verb} a {thing}.",
    "A {adjective} {noun} is not as {quality} as it looks.",
    "In the end, {person} {verb} everything and the {place} was {quality} again.",
    "Why the {thing} had been {verb} {time}, {person} never learned.",
    "The weather stayed {quality}, so {person} {verb} the {thing} alone.",
)

SYLLABLES = """ba be bo da del do fa fen ga gor ha hel i ja ka kel la lim lo ma mer mo na nor o pa per
ra ren ro sa sel so ta tel tor u va vel vo wa xan ya zan zo""".split()
