"""Text to ids and back, and chat templates in their sandbox."""

import datetime
import json

import pytest

from jaxkv.engine.checkpoint import load_tokenizer
from jaxkv.engine.tokenizer import CheckpointTokenizer
from tests.convert.folders import write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def make(tmp_path):
    def load(**settings) -> CheckpointTokenizer:
        write_tokenizer(tmp_path, **settings)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        return tokenizer

    return load


def render(make, template, messages=HELLO, **settings):
    return make(chat_template=template, **settings).apply_chat_template(messages)


def test_the_post_processor_adds_its_tokens_unless_told_not_to(make):
    tokenizer = make()
    assert tokenizer.encode("hello world") == [1, 4, 5]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [4, 5]
    assert tokenizer.encode("") == [1]


def test_special_tokens_in_a_text_are_recognised(make):
    ids = make().encode("<s>hello<|end|>", add_special_tokens=False)
    assert ids == [1, 4, 3]


def test_special_tokens_are_decoded_when_asked_for(make):
    tokenizer = make()
    assert tokenizer.decode([1, 4, 5, 2]) == "hello world"
    assert tokenizer.decode((1, 4), skip_special_tokens=False) == "<s> hello"
    assert tokenizer.decode([]) == ""


def test_the_vocabulary_ends_after_the_highest_id(make):
    assert make().num_token_ids == 8


def test_stored_truncation_and_padding_are_off(make, tmp_path):
    make()
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    data["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello world user") == [1, 4, 5, 6]


def test_special_tokens_are_texts_or_dicts(make):
    tokenizer = make(bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    nothing = make(bos_token=None)
    assert (nothing.bos_token, nothing.eos_token) == (None, None)
    assert nothing.chat_template is None


def test_a_conversation_is_rendered(make):
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] == 'system' %}{% continue %}{% endif %}\n"
        "{{ message.role }}: {{ message['content'] }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer = make(chat_template=template, bos_token="<s>", eos_token="</s>")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert tokenizer.apply_chat_template(messages) == "<s>user: hello</s>\nassistant:"
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert rendered == "<s>user: hello</s>\n"


def test_a_special_token_that_is_not_there_renders_as_nothing(make):
    assert render(make, "[{{ bos_token }}]") == "[]"


def test_templates_have_the_functions_that_transformers_gives(make):
    assert render(make, "{{ messages | tojson }}") == json.dumps(HELLO)
    assert render(make, "{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert render(make, "{{ strftime_now('%d %b %Y') }}") == today
    assert render(make, "{% generation %}hi{% endgeneration %}!") == "hi!"
    assert render(make, "{{ tools is none and documents is none }}") == "True"


def test_the_default_of_several_templates_is_taken(make):
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    assert render(make, templates) == "plain"
    with pytest.raises(ValueError, match=r"has no chat template"):
        render(make, templates[:1])


def test_the_callers_messages_are_not_changed(make):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match=r"the chat template failed"):
        render(make, "{{ messages.append(1) }}", messages)
    with pytest.raises(ValueError, match=r"the chat template failed"):
        render(make, "{{ messages[0].update({'role': 'x'}) }}", messages)
    assert messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"roles must alternate"),
        ("{% if %}", r"the chat template failed: Expected an expression"),
        ("{{ nothing.there }}", r"'nothing' is undefined"),
        ("{{ 1 + 'a' }}", r"unsupported operand"),
        ("{{ messages.__class__.__mro__ }}", r"unsafe"),
        ("{{ ''.__class__ }}{{ ''.__class__() }}", r"unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", r"Range too big"),
    ],
)
def test_whatever_a_template_does_wrong_is_a_value_error(make, template, message):
    with pytest.raises(ValueError, match=message):
        render(make, template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages must be a non-empty list of dicts, got \[\]"),
        ("hello", r"messages must be a non-empty list of dicts, got 'hello'"),
        (["hello"], r"message 0 must be a dict, got 'hello'"),
        ([*HELLO, {"content": "x"}], r"message 1 has no role: {'content': 'x'}"),
        ([{"role": 3, "content": "x"}], r"message 0 has no role"),
        ([{"role": "user"}], r"message 0 must have a text as its content"),
        ([{"role": "user", "content": 3}], r"message 0 must have a text"),
    ],
)
def test_malformed_messages_are_an_error(make, messages, message):
    with pytest.raises(ValueError, match=message):
        render(make, "x", messages)


def test_without_template_there_is_no_chat(make):
    with pytest.raises(ValueError, match=r"this checkpoint has no chat template"):
        make().apply_chat_template(HELLO)
