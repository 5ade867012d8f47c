"""Requests are tokenised outside the engine's thread, so that the engine can go on answering other requests."""

import threading

from server_helpers import load_named, serving, talk

LONG = "It was cold. " * 40


def test_a_body_is_tokenised_outside_the_engines_thread():
    found = []

    def watched(function):
        def call(*args, **options):
            if LONG.strip() in str(args[0]):
                found.append(threading.current_thread())
            return function(*args, **options)

        return call

    def change(model, tokenizer):
        for name in ("encode", "apply_chat_template"):
            setattr(tokenizer, name, watched(getattr(tokenizer, name)))

    with serving(load_named("demo", change)) as served:
        system = {"role": "system", "content": LONG}  # the server looks for it in other prompts
        asked = {"messages": [system, *talk(LONG)], "max_tokens": 1}
        assert served.post("/v1/chat/completions", asked).status_code == 200
        asked = {"prompt": LONG, "max_tokens": 1}
        assert served.post("/v1/completions", asked).status_code == 200
        assert served.post("/v1/completions", {"prompt": [10**6]}).status_code == 400
        assert found and served.engine._thread not in found
