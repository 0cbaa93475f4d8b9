"""Conversations, and what a model's generation_config.json asks for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.architectures import make_model
from tests.helpers.commands import lend, run
from tests.helpers.models import embedded_draft, open_llm
from treespec import LLM, SamplingParams
from treespec.engine.round_record import RoundRecord
from treespec.errors import ConfigError, ModelError, RequestError
from treespec.sampling_params import MIN_TEMPERATURE
from treespec.text.prompt_tokenizer import load_tokenizer
from treespec_weights import CheckpointError
from treespec_weights.verify import verify_checkpoint

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% if shouting %}!{% endif %}"
    "{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "def add(a, b):"}
SHORT = SamplingParams(max_tokens=4)
CONTINUED: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


def model_folder(folder: Path, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None) -> Path:
    """The first SSM with its tokenizer, a chat template and a generation_config.json."""
    shutil.copytree(embedded_draft("ssm-1"), folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return open_llm(model_folder(tmp_path_factory.mktemp("chat") / "model"))


def expected(llm: LLM, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """What transformers makes of the messages."""
    options = {"add_generation_prompt": True} | options
    return list(llm.get_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def test_a_conversation_is_the_templates_text(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    (output,) = llm.chat(messages, SHORT)
    assert output.prompt_token_ids == expected(llm, messages)
    bos = llm.get_tokenizer().bos_token or ""
    assert output.prompt == f"{bos}<system>Be brief.\n<user>def add(a, b):\n<assistant>"
    (same,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, SHORT)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    kwargs = {"shouting": True}
    (output,) = llm.chat([USER], SHORT, tools=[tool], chat_template_kwargs=kwargs)
    assert output.prompt is not None and output.prompt.endswith("[look]!<assistant>")
    assert output.prompt_token_ids == expected(llm, [USER], tools=[tool], **kwargs)
    (output,) = llm.chat([USER], SHORT, chat_template="Q: {{ messages[0].content }}\nA:")
    assert output.prompt == "Q: def add(a, b):\nA:"


def test_tools_that_the_template_does_not_read_are_announced_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    for read in ("{{ tools[0].function.name }}", "{% if tools %}look{% endif %}", "no tools"):
        for tools in ([tool], [tool]) if "[0]" in read else (None, [], [tool], [tool]):
            llm.chat([USER], SHORT, tools=tools, chat_template=read + "{{ messages[0].content }}")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("tools=... has no effect: the chat template 'no tools{{ messages[0].content }}' ignores it")


PARTS = {"role": "user", "content": [{"type": "text", "text": "def add"}, "(a, b):"]}

SHOWN = "{% for p in parts %}{% if p is mapping and p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
READS_PARTS = [
    "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.get('content') %}<{{ p.get('text') }}>{% endfor %}{% endfor %}",
    "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}",
    "{% set m = messages[0] %}{% set parts = m.content %}" + SHOWN,
    "{% macro show(parts) %}" + SHOWN + "{% endmacro %}{{ show(messages[0].content) }}",
    "{% for p in messages[0].content | selectattr('type', 'equalto', 'text') %}<{{ p.text }}>{% endfor %}",
    "<{{ messages[0].content | map(attribute='text') | join('><') }}>",
]


def test_a_content_in_parts(llm: LLM) -> None:
    """As in OpenAI's API: a template that reads texts gets one, and others the parts, of which a text is one."""
    for end in ("|", "{% for m in messages %}{% if 'x' in m.content %}x{% endif %}|{% endfor %}"):
        (output,) = llm.chat([PARTS], SHORT, chat_template="{{ messages[0].content }}" + end)
        assert output.prompt == "def add\n(a, b):|"
    for template in READS_PARTS:
        for message, prompt in ((PARTS, "<def add><(a, b):>"), (USER, "<def add(a, b):>")):
            (output,) = llm.chat([message], SHORT, chat_template=template)
            assert output.prompt == prompt, template
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5):
        with pytest.raises(RequestError, match=r"content part .*; valid: a string or {'type': 'text'"):
            llm.chat([{"role": "user", "content": [part]}], SHORT)


def test_parts_to_a_template_whose_roles_read_different_forms(llm: LLM) -> None:
    """The system's a text, the first part of a tool's, the user's and the assistant's parts or a text; no empty one."""
    system, tool = {**PARTS, "role": "system"}, {**PARTS, "role": "tool"}
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '[' + m.content + ']' }}"
        "{% elif m.role == 'tool' %}({{ m.content[0].text }}){% elif m.content is string %}{{ m.content }};"
        "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": []}
    (output,) = llm.chat([system, PARTS, answer, tool, USER], SHORT, chat_template=template)
    assert output.prompt == "[def add\n(a, b):]<def add><(a, b):>;(def add\n(a, b):)def add(a, b):;"
    template = "{{ messages[0].content[0].text }} {{ messages[1].content | tojson }}"
    (output,) = llm.chat([PARTS, tool], SHORT, chat_template=template)
    assert output.prompt == 'def add\n(a, b): "def add\\n(a, b):"'


def test_arguments_of_tool_calls_are_objects_to_the_template(llm: LLM) -> None:
    shown = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    rome = '{"city": "Rome"}'
    for arguments, said in ((rome, rome), (json.loads(rome), rome), ("", "{}"), (r'{"a": "\ud83d"}', '{"a": "?"}')):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        (output,) = llm.chat([{"role": "assistant", "tool_calls": [call]}], SHORT, chat_template=shown)
        assert output.prompt == said
        assert call["function"]["arguments"] == arguments, "the caller's own was changed"
    call = {"type": "function", "function": {"name": "look", "arguments": "{city"}}
    with pytest.raises(RequestError, match=r"arguments of a tool call: '{city' is not JSON"):
        llm.chat([{"role": "assistant", "tool_calls": [call]}], SHORT, chat_template=shown)


ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ " + ARGUMENTS + " | tojson }}", '{"city": "Rome"}'),
        ("{{ 'look' + " + ARGUMENTS + " }}", 'look{"city": "Rome"}'),  # DeepSeek's
        ("{{ " + ARGUMENTS + " }}", '{"city": "Rome"}'),
        ("{% for key, value in " + ARGUMENTS + " | items %}{{ key }}={{ value }}{% endfor %}", "city=Rome"),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(llm: LLM, template: str, said: str) -> None:
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        message = {"role": "assistant", "content": "So", "tool_calls": [{"function": {"arguments": arguments}}]}
        assert llm.chat([message], SHORT, chat_template=template)[0].prompt == said


def test_empty_fields_are_absent(llm: LLM) -> None:
    """As in the histories of clients that dump a message with all its fields."""
    template = "{% if 'tool_calls' in messages[0] %}calls{% else %}{{ messages[0].content }}{% endif %}"
    for calls in ([], None):
        message = {"role": "assistant", "content": "So", "tool_calls": calls, "refusal": None}
        assert llm.chat([message], SHORT, chat_template=template)[0].prompt == "So"


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    begun: list[Any] = [USER, {"role": "assistant", "content": "    return"}]
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": "    return"}]}]
    for messages in (begun, parts):
        (output,) = llm.chat(messages, SHORT, **CONTINUED)
        assert output.prompt is not None and output.prompt.endswith("<assistant>    return")
        assert output.prompt_token_ids == expected(llm, begun, **CONTINUED)
    with pytest.raises(ConfigError, match="add_generation_prompt=False"):
        llm.chat(begun, SHORT, continue_final_message=True)
    with pytest.raises(RequestError, match="of role 'user'"):
        llm.chat([USER], SHORT, **CONTINUED)


def test_a_chat_ends_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer = load_tokenizer(None, folder)
    tokenizer.add_tokens(["numer"], special_tokens=True)
    llm, end = open_llm(folder, tokenizer=tokenizer), tokenizer.convert_tokens_to_ids("numer")
    always = SamplingParams(max_tokens=4, logit_bias={end: 100.0})
    for written, tokens in (
        ("numer", [end]),
        (" numer\n<|endoftext|>", [end]),
        ("", [end] * 4),
        ("{{ raise_exception('no answers') if messages[1:] }}numer", [end] * 4),
        ("<|endoftext|>\nnumer", [end] * 4),  # already an end token of the model
        ("numer<|endoftext|>", [end] * 4),  # which comes next
    ):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + written + "{% endfor %}"
        (output,) = llm.chat([USER], always, chat_template=template)
        assert output.outputs[0].token_ids == tokens
    assert llm.generate("numer", always)[0].outputs[0].token_ids == [end] * 4


def test_bad_messages(llm: LLM) -> None:
    """One bad conversation leaves the others alone, and ends its stream before the first chunk."""
    bad: list[Any] = [[{"role": "nobody", "content": ""}], [{"content": "no role"}], []]
    outputs = llm.chat([[USER], *bad, [USER, {"role": "assistant", "content": "x"}, USER]], SHORT)
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    for output, words in zip(outputs[1:4], ("who?", "'role'", "has no messages"), strict=True):
        assert words in (output.error or "")
    assert outputs[0].outputs[0].token_ids == llm.chat([USER], SHORT)[0].outputs[0].token_ids
    for messages in (*bad[:2], [USER, "text"]):
        with pytest.raises(RequestError):
            next(llm.stream(messages, SHORT))
        assert llm.engine.scheduler.is_idle
    for messages in ("hello", ["hello"], 7):
        with pytest.raises(ConfigError, match="messages"):
            llm.chat(messages, SHORT)


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    command = ["generate", "def add(a, b):", "--model", folder, "--chat", "--max-tokens", 4, "--check", "--json"]
    document = run(*command).document
    (output,) = open_llm(folder, generation_config="treespec").chat([USER], SHORT)
    assert document["token_ids"] == output.outputs[0].token_ids and document["identical"] is True
    bare = model_folder(tmp_path / "bare", None)
    command[3] = bare
    message = run(*command, code=2).document["error"]["message"]
    assert "no chat template" in message
    assert "--chat-template FILE" in message and "chat_template=" not in message
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    assert run(*command, "--chat-template", template).document["token_ids"] == document["token_ids"]
    command[-1] = "--stream"  # in place of --json
    ran = run(*command, "--chat-template", template)
    assert ran.stdout == document["text"] + "\n" and "identical to plain decoding" in ran.stderr
    command.remove("--chat")
    assert run(*command, "--chat-template", template).stdout == ran.stdout
    command.append("--no-chat")
    assert "omit one of them" in run(*command, "--chat-template", template, code=2).stderr


def test_a_conversation_in_the_terminal(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_all_pages_back: None
) -> None:
    lend(llm, monkeypatch)
    system, params = {"role": "system", "content": "Be brief."}, SamplingParams(max_tokens=6)

    def answered(*messages: dict[str, str]) -> dict[str, str]:
        (output,) = llm.chat([system, *messages], params)
        return {"role": "assistant", "content": output.outputs[0].text or ""}

    again, long = {"role": "user", "content": "and mul?"}, "x" * 2000
    first = answered(USER)
    second, fresh = answered(USER, first, again), answered(again)
    command = ["chat", "--system", "Be brief.", "--max-tokens", 6]
    lines = [USER["content"], long, again["content"], "/new", "/halp", "", again["content"], "/exit", "never asked"]
    ran = run(*command, stdin="\n".join(lines))
    assert ran.stdout == "".join(f"{answer['content']}\n" for answer in (first, second, fresh))
    told = ran.stderr.splitlines()
    assert [line.split(":")[0].split(",")[0] for line in told] == [
        "[6 tokens",
        "error",
        "[6 tokens",
        "no command /halp",
        "[6 tokens",
    ]
    assert told[1].endswith("/new starts another conversation") and told[2].endswith("tokens/s, truncated]")

    def interrupt(record: RoundRecord) -> None:
        if record.number == 2 and len(record.context) < len(expected(llm, [system, USER])) + 6:
            raise KeyboardInterrupt

    with llm.add_round_observer(interrupt):
        begun = {"role": "assistant", "content": run(*command, stdin=USER["content"]).stdout[:-1]}
        assert begun["content"] and first["content"].startswith(begun["content"])
        ran = run(*command, stdin=f"{USER['content']}\n{again['content']}\n")
    assert ran.stdout == f"{begun['content']}\n{answered(USER, begun, again)['content']}\n"

    message = "error: a message from stdin is not utf-8: invalid start byte b'\\xff'; convert it\n"
    assert run("chat", stdin=b"caf\xff\n", code=2).stderr == message

    lend(open_llm(model_folder(tmp_path / "bare", None)), monkeypatch)
    assert "no chat template" in run("chat", code=2).stderr
    assert "--temperature" in run("chat", "--top-p", 0.5, code=2).stderr
    assert "--no-spec is plain" in run("chat", "--no-spec", "--nodes", 4, code=2).stderr


STREAMED = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop="e")]


@pytest.mark.parametrize("params", STREAMED, ids=["greedy", "sampled"])
def test_a_conversation_streams_what_chat_answers(llm: LLM, params: SamplingParams) -> None:
    for messages, options in (
        ([{"role": "system", "content": "Be brief."}, USER], {"chat_template_kwargs": {"shouting": True}}),
        ([PARTS], {"chat_template": "{{ messages[0].content }}:"}),
        ([USER, {"role": "assistant", "content": "    return"}], CONTINUED),
    ):
        (whole,) = llm.chat(messages, params, **options)
        chunks = list(llm.stream(messages, params, **options))
        assert "".join(chunk.text or "" for chunk in chunks) == whole.outputs[0].text
        final = chunks[-1].output
        assert final is not None and final.prompt == whole.prompt
        assert final.outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_stream_is_of_one_conversation_or_prompt(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"one conversation, not 2; .*or use chat"):
        next(llm.stream([[USER], [USER]], SHORT))
    for prompts in (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]):
        with pytest.raises(ConfigError, match=r"one prompt, not .*or use generate"):
            next(llm.stream(prompts, SHORT))
    with pytest.raises(ConfigError, match="tools, chat_template_kwargs without a conversation; pass messages"):
        next(llm.stream("text", SHORT, tools=[], chat_template_kwargs={"shouting": True}))
    with pytest.raises(ConfigError, match=r"stream=True is not supported; use llm\.stream"):
        llm.chat([USER], SHORT, stream=True)


def test_the_models_own_parameters(tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 6}
    folder = model_folder(tmp_path / "model", generation=asked | {"eos_token_id": [0, 7]})
    llm = open_llm(folder)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.9, top_k=50, repetition_penalty=1.1, max_tokens=6)
    assert llm.engine.runner.target.config.eos_token_ids == (0, 7)
    (output,) = llm.generate("def add(a, b):")
    assert output.metrics.seed is not None and len(output.outputs[0].token_ids) <= 6
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    in_memory, adapted = open_llm(model, exact=False), open_llm(folder, exact=False, backend="transformers")
    assert in_memory.get_default_sampling_params() == adapted.get_default_sampling_params() == params
    assert in_memory.engine.runner.target.config.eos_token_ids == (0, 7)
    assert open_llm(make_model("stablelm"), exact=False).get_default_sampling_params() == SamplingParams()
    for given, neutral in (("treespec", SamplingParams()), ("vllm", SamplingParams(temperature=1.0, max_tokens=16))):
        assert open_llm(folder, generation_config=given).get_default_sampling_params() == neutral
    other = model_folder(tmp_path / "other", generation={"temperature": 0.5})
    assert open_llm(folder, generation_config=other).get_default_sampling_params() == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50)),
        ({"temperature": 0.7, "top_k": 20, "min_p": 0.05}, SamplingParams(temperature=0.7, top_k=20, min_p=0.05)),
        ({"do_sample": True, "temperature": None, "top_k": 0}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 1e-6, "top_k": 50.0, "max_new_tokens": 9.0},
            SamplingParams(temperature=MIN_TEMPERATURE, top_k=50, max_tokens=9),
        ),
    ],
)
def test_what_generation_configs_mean(generation: dict[str, Any], params: SamplingParams, tmp_path: Path) -> None:
    llm = open_llm(model_folder(tmp_path / "model", None, generation))
    assert llm.get_default_sampling_params() == params
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([USER], SHORT)
    assert llm.chat([USER], SHORT, chat_template="{{ messages[0].content }}")[0].prompt == USER["content"]


def test_unusable_generation_configs(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    for text, backend, error, words in (
        ('{"temperature": "warm"}', "native", ModelError, r"generation_config\.json.*'warm'"),
        ('{"do_sample": "yes"}', "native", ModelError, r"config\.json.*do_sample='yes'; valid: true or false"),
        ('{"do_sample": true, "top_k": 50.5}', "native", ModelError, r"top_k=50\.5; valid: .*_config='treespec'"),
        ("[1, 2]", "native", CheckpointError, r"generation_config\.json"),
        ("null", "transformers", CheckpointError, r"generation_config\.json"),
    ):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(error, match=words):
            open_llm(folder, backend=backend)
        if error is CheckpointError:
            assert any("generation_config.json" in problem.where for problem in verify_checkpoint(folder).problems)
        else:
            llm = open_llm(folder, generation_config="treespec")
            assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match=r"has no generation_config\.json"):
        open_llm(folder, generation_config=tmp_path)
    with pytest.raises(OSError, match="no such"):
        open_llm(folder, generation_config="nowhere")
