"""Models that were trained to chat but have no chat template get the one of their kind, and are said to (C02)."""

import json

import pytest

from engine.convert.report import inspect
from engine.convert.source import open_source
from engine.text.fallback import _FALLBACKS, fallback_for
from engine.text.template import ChatTemplate, repaired
from tests.factory import CHATML, cfg, make, tok_json

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
PROMPTS = {
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "Granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hello<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Bye<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "GLM-4": "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello<|user|>\nBye<|assistant|>\n",
    "ChatGLM3": "[gMASK]sop<|system|>\n Be brief.<|user|>\n Hi<|assistant|>\n Hello<|user|>\n Bye<|assistant|>\n",
    "Phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n"
    "<|assistant|>\n",
    "DeepSeek": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜>",
    "Cohere": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "Mistral": "<s>[INST] Be brief.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]",
    "Llama 2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
}


@pytest.mark.parametrize("fallback", _FALLBACKS, ids=lambda fallback: fallback.name)
def test_what_is_written(fallback):
    template = ChatTemplate({"default": fallback.template}, {"bos_token": "<s>"})
    assert template.apply(CHAT) == PROMPTS[fallback.name]
    assert template.accepts_system
    assert template.after_answer.strip().startswith(fallback.end)
    assert repaired(CHAT[1:], template) == (CHAT[1:], ())


@pytest.mark.parametrize("fallback", _FALLBACKS, ids=lambda fallback: fallback.name)
def test_which_is_taken(fallback):
    families = fallback.families or ("AnyForCausalLM",)
    found = fallback_for("my-7b-Instruct", families[0], fallback.tokens.__contains__, lambda _: False)
    assert found is fallback
    assert fallback_for("my-7b", families[0], fallback.tokens.__contains__, lambda _: False) is None
    by_end = fallback_for("my-7b", families[0], fallback.tokens.__contains__, fallback.end.__eq__)
    assert (by_end is fallback) == (fallback.end not in {"</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"})


@pytest.mark.parametrize("name", ["x-chat", "Chat_7b", "gemma-2b-it", "a.instruct.v2", "m-Instruct2", "assistant"])
def test_names_of_models_that_chat(name):
    assert fallback_for(name, "", lambda _: True, lambda _: False)


@pytest.mark.parametrize("name", ["x-base", "chatter", "iteration", "instructions", ""])
def test_names_of_models_that_do_not(name):
    assert fallback_for(name, "", lambda _: True, lambda _: False) is None


def test_a_model_whose_answers_end_like_turns_gets_one_and_it_is_said(tmp_path):
    source = open_source(make(tmp_path / "m", cfg(eos_token_id=[257, 259]), template=None))
    template = ChatTemplate.from_files(source.files)
    assert template.apply(CHAT[1:2]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert any("ChatML is taken" in notice for notice in source.notices)
    assert inspect(tmp_path / "m").chat_template


def test_a_base_model_goes_on_with_the_text(tmp_path):
    source = open_source(make(tmp_path / "m", template=None))
    assert ChatTemplate.from_files(source.files).completion
    assert not inspect(tmp_path / "m").chat_template


def test_a_broken_template_is_replaced_wherever_it_was(tmp_path):
    folder = make(tmp_path / "toy-chat", template="{% for m in messages %}{{ m.content }")
    (folder / "chat_template.jinja").write_text("{% if %}")
    source = open_source(folder)
    assert not ChatTemplate.from_files(source.files).completion
    assert any("is wrong in line" in notice for notice in source.notices)
    assert any("ChatML is taken" in notice for notice in source.notices)


def test_a_template_of_its_own_stays(tmp_path):
    source = open_source(make(tmp_path / "toy-chat", cfg(eos_token_id=259), template="OWN " + CHATML))
    assert ChatTemplate.from_files(source.files).apply(CHAT[1:2]).startswith("OWN ")
    assert "chat_template.jinja" not in source.files


def test_without_the_tokens_there_is_none(tmp_path):
    folder = make(tmp_path / "toy-chat", template=None, tok=tok_json(extra=("<a>", "<b>", "<|im_start|>", "<c>")))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    assert ChatTemplate.from_files(open_source(folder).files).completion
