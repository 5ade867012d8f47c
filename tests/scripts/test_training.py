"""The seed makes the shipped tokenizer, and sequences are what their mix says."""

from training_batches import ANSWER, COPY, Mix, SequenceMaker
from training_tokenizer import train_tokenizer

from mlx_snapkv.demo import MODELS


def test_the_seed_makes_the_shipped_tokenizer_and_sequences_are_what_their_mix_says():
    tokenizer = train_tokenizer(1)
    shipped = (MODELS["demo"] / "tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer.to_str() == shipped
    maker = SequenceMaker(tokenizer, 1)
    for mix, kind in ((Mix(300, facts=20, copy=0.0), ANSWER), (Mix(300, facts=20, copy=1.0), COPY)):
        ids, labels = maker.batch(mix, 1200)
        assert ids.shape == labels.shape and len(ids) == 4
        assert 250 < ids.shape[1] <= 340 and (labels == kind).any()
        assert not (labels == (ANSWER + COPY - kind)).any()
