"""A book that is saved is asked on: by other processes, by several at once, and in spite of what befalls its files."""

import random
from subprocess import PIPE

import fork_helpers
import pytest
from chat_helpers import all_right, ask, begun
from command_lines import MODULE

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.caches.layers import file_bytes
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import make_haystack

ASKED = "snapkv:top_k=92,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21"
BOOK = f"keydiff:budget=64,block=64 then {ASKED}"


def test_questions_before_and_after_in_processes_at_once(path):
    name = "demo-qwen3-next"
    model, tokenizer = load_model(name)
    document, facts = make_haystack(tokenizer, random.Random(5), 4, 2048)
    policy = f"keydiff:budget=128,block=256 then {ASKED}"
    options = {"policy": policy, "memory": "recall:file", "max_tokens": 16}
    conversation = begun((model, tokenizer), (document, facts), **options)
    assert all(all_right(conversation, facts))
    conversation.save(path)
    command = [*MODULE, "chat", "--model", name, "-m", "16", "-q"]
    lines = path.with_name("lines.txt")
    lines.write_text("\n".join([f"/load {path}", *(fact.question for fact in facts)]))
    both = []
    for _ in range(2):
        with lines.open() as stdin:
            both.append(fork_helpers.Popen(command, stdin=stdin, stdout=PIPE, text=True))
    for process in both:
        out, _ = process.communicate()
        assert (process.returncode, out.splitlines()) == (0, [fact.value for fact in facts])


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 4, 1024)


def a_book(model, haystack, memory="recall:file"):
    """A book of which one question was asked."""
    return begun(model, haystack, 1, policy=BOOK, memory=memory)


@pytest.mark.parametrize(("name", "bits"), [("demo_llama", ""), ("demo_qwen", ":4bit")])
def test_it_goes_on_as_without_the_interruption_wherever_it_is_kept(
    request, haystack, name, bits, path
):
    demo_model = request.getfixturevalue(name)
    conversation = a_book(demo_model, haystack, f"recall{bits}")
    conversation.save(path)
    own = Conversation.load(path, *demo_model, max_tokens=12)
    assert (str(own.policy), own.memory) == (str(conversation.policy), f"recall{bits}")
    in_file = Conversation.load(path, *demo_model, memory=f"recall:file{bits}", max_tokens=12)
    assert in_file.memory == f"recall:file{bits}"
    for fact in haystack[1][1:]:
        wanted = ask(conversation, fact.question)
        assert ask(own, fact.question) == ask(in_file, fact.question) == wanted
    assert file_bytes(own.prompt_cache) == 0 < file_bytes(in_file.prompt_cache)
    in_file.save(path)  # over the files that it reads, and goes on reading
    again = Conversation.load(path, *demo_model, max_tokens=12)
    for fact in haystack[1]:
        assert ask(again, fact.question) == ask(in_file, fact.question)


@pytest.mark.parametrize(
    "kind, place",
    [("keys", 0.6), ("values", 0)],  # what the vote reads, and what is always gathered
)
def test_a_flipped_bit_is_one_sentence_and_costs_one_turn(demo_llama, haystack, path, kind, place):
    a_book(demo_llama, haystack).save(path)
    damaged, whole = (Conversation.load(path, *demo_llama, max_tokens=12) for _ in range(2))
    _, file, *_ = sorted(path.parent.glob(f"*.entries/*.{kind}"))
    data = file.read_bytes()
    place = int(place * len(data))
    question = haystack[1][1].question
    before = list(damaged.messages), list(damaged.read), damaged.prompt_cache[0].offset
    file.write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
    with pytest.raises(SnapKVError) as error:
        ask(damaged, question)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert (damaged.messages, damaged.read, damaged.prompt_cache[0].offset) == before
    file.write_bytes(data)
    for fact in haystack[1][1:]:
        assert ask(damaged, fact.question) == ask(whole, fact.question)
