"""Test the server with coding agents and client libraries: ten turns with tools, under five families' chat templates.

    python scripts/try_agents.py      # writes docs/agents.json; then: make docs; needs npm

The newest versions of agents and libraries are installed. The built-in model can't program, so it is forced to give
the answer in the user's message. Everything else is real: clients, prompts, HTTP, the prefix cache, and the parsing of
calls.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_page import ROOT, Result, Row, options

sys.path.insert(0, str(ROOT / "tests"))
from acting_server import SAY, acting
from agent_templates import FAMILIES
from server_helpers import Limits, Served

from mlx_snapkv.server.log import log

FOLDER = ROOT / "build" / "agents"  # installed npm packages, and two virtual environments
FILES = ROOT / "scripts" / "agents"
TEMPLATES = ("chatml", "llama3", "mistral", "gemma", "thinking")
CONTEXT = 24_000  # maximum prompt length in tokens
N_NOTES = 330  # lines of a file that exceeds the context if it is read twice
END = " END"  # ends the text that the model should say; agents add words after it
SUMMARY = re.compile("detailed summary|handoff summary|summary of the conversation", re.I)
RESULT = re.compile(r"<\|tool\|>|\[RESULT |\[result\]")  # marks a tool's result in the templates
DONE = "It is done."
NAMED = re.compile(r"\b(t) \| tojson(\(.*?\))?")
OF_A_REQUEST = "a request: "  # prefix of log warnings about ignored fields
TIMEOUT = 400  # seconds for an agent's turn, and for a library's session


@dataclass(frozen=True)
class Turn:
    """What the model should do in a turn.

    Attributes:
        text: text of the answer.
        commands: commands to call; after their results, the model says `DONE`.
        files: contents of the files that the commands write, by name.
    """

    text: str = ""
    commands: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)

    def is_answered(self, output: str, work: Path) -> bool:
        """Return whether a client printed the answer, and its tool wrote the files."""
        has_files = all(_read(work / name) == text for name, text in self.files.items())
        return (self.text or DONE) in output and has_files


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


READ = "cat notes.txt"
TURNS = [
    Turn("hello"),
    Turn("", ("echo made > made.txt",), {"made.txt": "made\n"}),
    Turn(
        "", ("echo one > one.txt", "echo two > two.txt"), {"one.txt": "one\n", "two.txt": "two\n"}
    ),
    Turn("", ("true",)),
    Turn("", ("cat nothing.txt",)),
    Turn("Grüße, 你好 🎉"),
    Turn("", ("echo '</tool_call>' > odd.txt",), {"odd.txt": "</tool_call>\n"}),
    Turn("", (READ,)),
    Turn("", (READ,)),
    Turn("and on"),
]


@dataclass
class Agent:
    """A coding agent, and how to start it.

    SERVER in arguments, files and environment is replaced by the server's URL.

    Attributes:
        package: npm or pip package.
        api: path of the API that the agent uses.
        program: path of the program in `FOLDER`.
        new, again: arguments before the prompt, for a new conversation and for the next turn.
        tool: the model's call that runs a command, with ~ for quotes, because some agents escape quotes; empty if the
            agent takes files from the answer's text.
        files: name in the home folder -> name in `agents/`, for each file.
    """

    package: str
    api: str
    program: str
    new: list[str]
    again: list[str]
    tool: str = ""
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


CLAUDE = ["--model", "local", "--allowedTools=Bash"]
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
OPENCODE_PROGRAM = "opencode-linux-x64/bin/opencode" if sys.platform == "linux" else ".bin/opencode"
AIDER = "--model openai/local --openai-api-base SERVER/v1 --openai-api-key any --edit-format whole"
AIDER += " --no-git --yes-always --no-show-model-warnings --no-check-update --analytics-disable"
OPENCODE = ["run", "-m", "local/local"]
AGENTS = [
    Agent(
        "@anthropic-ai/claude-code",
        "/v1/messages",
        "node_modules/.bin/claude",
        [*CLAUDE, "-p"],
        [*CLAUDE, "-c", "-p"],
        "{~name~: ~Bash~, ~arguments~: {~command~: ~COMMAND~, ~description~: ~a command~}}",
        environment={
            "ANTHROPIC_BASE_URL": "SERVER",
            "ANTHROPIC_AUTH_TOKEN": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        "@openai/codex",
        "/v1/responses",
        "node_modules/.bin/codex",
        ["exec", *CODEX],
        ["exec", "resume", "--last", *CODEX],
        "{~name~: ~exec_command~, ~arguments~: {~cmd~: ~COMMAND~}}",
        {".codex/config.toml": "codex.toml"},
    ),
    Agent(
        "opencode-ai",
        "/v1/chat/completions",
        f"node_modules/{OPENCODE_PROGRAM}",
        OPENCODE,
        [*OPENCODE, "-c"],
        "{~name~: ~bash~, ~arguments~: {~command~: ~COMMAND~, ~description~: ~a command~}}",
        {".config/opencode/opencode.json": "opencode.json"},
    ),
    Agent(
        "aider-chat",
        "/v1/chat/completions",
        "aider/bin/aider",
        [*AIDER.split(), "--message"],
        [*AIDER.split(), "--restore-chat-history", "--message"],
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
]
PACKAGES = ["openai", "anthropic", "litellm", "langchain-openai"]
CLIENTS = [  # arguments of library_session.py
    ("openai", "/v1/chat/completions"),
    ("openai", "/v1/responses"),
    ("anthropic", "/v1/messages"),
    ("litellm", "/v1/chat/completions"),
    ("litellm", "/v1/messages"),
    ("langchain-openai", "/v1/chat/completions"),
    ("langchain-openai", "/v1/responses"),
]
CALL = "{~name~: ~run~, ~arguments~: {~command~: ~COMMAND~}}"  # the model's call to the libraries' tool


def what_to_say(prompt: str) -> str:
    """Return what the model should answer to a prompt.

    It is the text between `SAY` and `END` in the last user message, or `DONE` if there is no such text or a tool has
    already been run. A request for a summary gets a summary.
    """
    _, _, last_message = prompt.rpartition("<|user|>")
    _, say, text_and_rest = last_message.rpartition(SAY)
    text, _, after = text_and_rest.partition(END)
    if SUMMARY.search(after if say else last_message):
        return "<analysis>Notes.</analysis><summary>Notes were read.</summary>"
    has_tool_result = RESULT.search(after) is not None
    is_done = not say or has_tool_result
    answer = DONE if is_done else text.strip().replace("~", '"')
    return f"A tool may do.</think>{answer}" if prompt.endswith("<think>") else answer


def user_message(turn: Turn, call: str) -> str:
    """Return the message that makes the model carry out a turn.

    Args:
        turn: the turn, with its commands, files or text.
        call: a tool call with COMMAND in place of the command; if empty, the model answers with the files.
    """
    if turn.text:
        answer = turn.text
    elif call:
        calls = [call.replace("COMMAND", command) for command in turn.commands]
        answer = "".join(f"<tool_call>{text}</tool_call>" for text in calls)
    else:
        files = [f"{name}\n```\n{text}```\n\n" for name, text in turn.files.items()]
        answer = "".join(files) + DONE
    return f"{SAY}{answer}{END}"


@contextlib.contextmanager
def session(template: str, n_notes: int = 3) -> Iterator[tuple[Served, Path]]:
    """Run a server with a family's template. Yield it, and a home folder that has a work folder with notes.

    The template lists tools by name only, because the built-in model needs four times as many tokens as other models.
    """
    limits = Limits(context=CONTEXT)
    with tempfile.TemporaryDirectory() as home, acting(what_to_say, limits=limits) as served:
        served.engine.loaded.tokenizer._tokenizer.chat_template = NAMED.sub(
            r"\1.function.name", FAMILIES[template]
        )
        work = Path(home) / "work"
        work.mkdir()
        notes = (f"Note {n}: nothing of what is written here matters.\n" for n in range(n_notes))
        (work / "notes.txt").write_text("".join(notes))
        yield served, Path(home)


def try_agent(agent: Agent, template: str) -> Row:
    """Run an agent through all turns and return a row. With the first template, the turns outgrow the context."""
    n_notes = N_NOTES if template == TEMPLATES[0] else 3
    with session(template, n_notes) as (served, home), logged() as warnings:
        for name, template_name in agent.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            text = (FILES / template_name).read_text()
            file.write_text(text.replace("SERVER", served.url).replace("24000", str(CONTEXT)))
        turn_starts = []  # number of prompts before each turn
        n_answered = 0
        for number, turn in enumerate(TURNS):
            turn_starts.append(len(served.prompts))
            is_first = number == 0
            words = agent.new if is_first else agent.again
            output = _run_agent(agent, [*words, user_message(turn, agent.tool)], home, served)
            n_answered += turn.is_answered(output, home / "work")
        # A turn without prompts means that the agent has failed.
        second_turn_prompts = served.prompts[turn_starts[1] : turn_starts[2]] or [(0, 0)]
        lengths = [length for length, _ in served.prompts] or [0]
        row = _row(agent.package, agent.api, template, n_answered, served, warnings)
        return row | {
            "second_turn": second_turn_prompts[0],
            "longest": max(lengths),
            "after": lengths[-1],
        }


def _run_agent(agent: Agent, words: list[str], home: Path, served: Served) -> str:
    """Run an agent with these arguments and return its output."""
    environment = {
        name: text.replace("SERVER", served.url) for name, text in agent.environment.items()
    }
    return _run(
        [str(FOLDER / agent.program), *(word.replace("SERVER", served.url) for word in words)],
        cwd=home / "work",
        env={"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", **environment},
        stdin=subprocess.DEVNULL,
    )


def try_library(package: str, api: str, template: str) -> Row:
    """Run a client library through all turns and return a row."""
    with session(template) as (served, home), logged() as warnings:
        program = FOLDER / "libraries" / "bin" / "python"
        output = _run(
            [str(program), str(FILES / "library_session.py"), f"{package} {api}", served.url],
            input=json.dumps([user_message(turn, CALL) for turn in TURNS]),
            cwd=home / "work",
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # instead of a download
        )
        # litellm prints other lines, too.
        answers = [json.loads(line) for line in output.splitlines() if line.startswith('"')]
        n_answered = sum(
            turn.is_answered(answer, home / "work") for turn, answer in zip(TURNS, answers)
        )
        return _row(package, api, template, n_answered, served, warnings)


@contextlib.contextmanager
def logged() -> Iterator[set[str]]:
    """Yield a set that collects the server's log messages during the block."""
    messages: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: messages.add(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def _run(words: list[str], **options: Any) -> str:
    """Run a program and return its output within `TIMEOUT`."""
    try:
        process = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, **options)
    except subprocess.TimeoutExpired as error:
        print(f"{words[0]}: no end after {TIMEOUT} s", flush=True)
        return (error.stdout or b"").decode()
    print(f"{words[0]}: {(process.stderr or process.stdout).strip()[-1000:]}", flush=True)
    return process.stdout


def _row(
    client: str, api: str, template: str, n_answered: int, served: Served, warnings: set[str]
) -> Row:
    """Return the row for a client and template."""
    metrics = served.client.get("/metrics").text.splitlines()
    refused = [line for line in metrics if 'status="4' in line and "_total" in line]
    ignored_fields = [message for message in warnings if message.startswith(OF_A_REQUEST)]
    return {
        "client": client,
        "api": api,
        "template": template,
        "turns": len(TURNS),
        "answered": n_answered,
        "refused": int(sum(float(line.split()[-1]) for line in refused)),
        "warnings": sorted(message.removeprefix(OF_A_REQUEST) for message in ignored_fields),
    }


def install() -> dict[str, str]:
    """Install the newest agents and libraries, and return their versions."""
    packages = [agent.package for agent in AGENTS if "node_modules" in agent.program]
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", *packages], cwd=FOLDER, check=True)
    versions = {}
    for name in packages:
        package_file = FOLDER / "node_modules" / name / "package.json"
        versions[name] = json.loads(package_file.read_text())["version"]
    return versions | _pip_install("libraries", PACKAGES) | _pip_install("aider", ["aider-chat"])


def _pip_install(folder: str, packages: list[str]) -> dict[str, str]:
    """Install packages in a new virtual environment and return their versions."""
    subprocess.run([sys.executable, "-m", "venv", FOLDER / folder], check=True)
    pip = [FOLDER / folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, stdout=subprocess.PIPE)
    versions = {package["name"]: package["version"] for package in json.loads(listed.stdout)}
    return {name: versions[name] for name in packages}


def main() -> None:
    """Try each library and each agent under each template, and add the rows."""
    options(__doc__).parse_args()
    result = Result(ROOT / "docs" / "agents", clients=install())
    for template in TEMPLATES:
        for package, api in CLIENTS:
            result.add(try_library(package, api, template))
    for template in TEMPLATES:
        for agent in AGENTS:
            result.add(try_agent(agent, template))


if __name__ == "__main__":
    main()
