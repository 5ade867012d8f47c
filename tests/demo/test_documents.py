import random
import re

import pytest

from mlx_snapkv.demo.documents import Fact
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt, token_counter
from mlx_snapkv.engine.token_ids import common_prefix


def test_prompts_of_a_haystack_share_all_but_the_question(demo_llama):
    _, tokenizer = demo_llama
    document, facts = make_haystack(tokenizer, random.Random(0), 12, 800)
    assert 760 <= token_counter(tokenizer)(document) <= 800
    for fact in facts:
        told = re.findall(rf"he {fact.attribute} of the {fact.subject} is ([^.]+)\.", document)
        assert told == [fact.value]
    prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    shared = common_prefix(prompts)
    assert 760 < shared < min(map(len, prompts))
    assert tokenizer.decode(prompts[0][shared:]).endswith("?<|assistant|>")


@pytest.mark.parametrize(
    "answer, begins",
    [
        (" 1234.", True),
        ("1234\nmore", True),
        ("It is 1234.", False),
        ("12345", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_begins_with_the_value_alone(answer, begins):
    assert is_right(Fact("access code", "amber falcon", "1234"), answer) == begins
