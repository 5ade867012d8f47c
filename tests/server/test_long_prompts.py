"""The server's log says which prompts are too long for the model."""

from server_helpers import load_named, serving


def test_what_is_too_long_is_told_and_answered(caplog):
    def shorten(model, tokenizer):
        model.args.max_position_embeddings = 600

    with serving(load_named("demo", shorten)) as server:
        for n in (5, 700):
            body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200
    (told,) = caplog.messages
    assert told.startswith("700 tokens are more than the 600 that this model was trained to")
