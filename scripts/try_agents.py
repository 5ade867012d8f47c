"""What coding agents and client libraries do with the server, in ten turns with tools under five families' templates.

    python scripts/try_agents.py      # writes docs/agents.json; then: make docs; needs npm

Agents and libraries are installed at their newest. The embedded model can't program, so it is made
to say what the user asks for. All else is real: the clients, their prompts, HTTP, what is read of the prompts and what
was known of them, and the calls that the server finds.
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

FOLDER = ROOT / "build" / "agents"  # of npm's, and of two virtual environments
FILES = ROOT / "scripts" / "agents"
TEMPLATES = ("chatml", "llama3", "mistral", "gemma", "thinking")
CONTEXT = 24_000  # tokens of a prompt, at most
N_NOTES = 330  # lines of a file that outgrows the context when it is read twice
END = " END"  # of what the model is to say; agents put words of their own behind it
SUMMARY = re.compile("detailed summary|handoff summary|summary of the conversation", re.I)
RESULT = re.compile(r"<\|tool\|>|\[RESULT |\[result\]")  # as the templates put a tool's
DONE = "It is done."
NAMED = re.compile(r"\b(t) \| tojson(\(.*?\))?")
OF_A_REQUEST = "of a request "  # what the server's log says that it left out
TIMEOUT = 400  # seconds of a turn, and of a library's session


@dataclass(frozen=True)
class Turn:
    """What the model is to say: a text, or calls of commands, after whose results it says `DONE`.

    Attributes:
        made: files that have been written afterwards.
    """

    text: str = ""
    commands: tuple[str, ...] = ()
    made: dict[str, str] = field(default_factory=dict)

    def answered(self, said: str, work: Path) -> bool:
        """Whether a client has shown the answer, and its tool has done what was asked."""
        written = (name for name, text in self.made.items() if _read(work / name) == text)
        return (self.text or DONE) in said and len(list(written)) == len(self.made)


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
    """A program of npm's or pip's, the address that it asks, and how it is used.

    Attributes:
        new, again: the words before a prompt, of a new conversation and of one that goes on.
        tool: the call that runs a command, with ~ for quotes, which some agents escape; none where answers have files.
        files: by name in its home folder, those of `agents/`.

    In words, files and the environment, SERVER is the address.
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
CLIENTS = [  # of library_session.py
    ("openai", "/v1/chat/completions"),
    ("openai", "/v1/responses"),
    ("anthropic", "/v1/messages"),
    ("litellm", "/v1/chat/completions"),
    ("litellm", "/v1/messages"),
    ("langchain-openai", "/v1/chat/completions"),
    ("langchain-openai", "/v1/responses"),
]
CALL = "{~name~: ~run~, ~arguments~: {~command~: ~COMMAND~}}"  # of the libraries' tool


def what_to_say(prompt: str) -> str:
    """What the last message asks for."""
    last = prompt.rpartition("<|user|>")[2]
    _, asked, text = last.rpartition(SAY)
    text, _, behind = text.partition(END)
    if SUMMARY.search(behind if asked else last):
        return "<analysis>Notes.</analysis><summary>Notes were read.</summary>"
    said = DONE if not asked or RESULT.search(behind) else text.strip().replace("~", '"')
    return f"A tool may do.</think>{said}" if prompt.endswith("<think>") else said


def asked(turn: Turn, call: str) -> str:
    """What a user says, to have the model say what the turn wants; `call` is one of a COMMAND, or else files are."""
    calls = (f"<tool_call>{call.replace('COMMAND', each)}</tool_call>" for each in turn.commands)
    files = (f"{name}\n```\n{text}```\n\n" for name, text in turn.made.items())
    said = turn.text or ("".join(calls) if call else "".join(files) + DONE)
    return f"{SAY}{said}{END}"


@contextlib.contextmanager
def session(template: str, n_notes: int = 3) -> Iterator[tuple[Served, Path]]:
    """A server with this family's template, and the folder of somebody's home, with one for work with notes.

    Of tools only the names are read: the embedded model has four tokens where others have one.
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


def turn_by_turn(agent: Agent, template: str) -> Row:
    """What became of an agent's turns, which outgrow the context under the first family's template."""
    n_notes = N_NOTES if template == TEMPLATES[0] else 3
    with session(template, n_notes) as (served, home), left_out() as warnings:
        for name, ours in agent.files.items():
            file, text = home / name, (FILES / ours).read_text()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("SERVER", served.url).replace("24000", str(CONTEXT)))
        starts, n_answered = [], 0
        for number, turn in enumerate(TURNS):
            starts.append(len(served.prompts))
            words = agent.again if number else agent.new
            said = _said(agent, [*words, asked(turn, agent.tool)], home, served)
            n_answered += turn.answered(said, home / "work")
        second = served.prompts[starts[1] : starts[2]] or [(0, 0)]  # if the agent has failed
        lengths = [n for n, _ in served.prompts] or [0]
        about = _row(agent.package, agent.api, template, n_answered, served, warnings)
        context = {"second_turn": second[0], "longest": max(lengths), "after": lengths[-1]}
        return about | context


def _said(agent: Agent, words: list[str], home: Path, served: Served) -> str:
    """What an agent prints."""
    told = {name: text.replace("SERVER", served.url) for name, text in agent.environment.items()}
    return _printed(
        [str(FOLDER / agent.program), *(word.replace("SERVER", served.url) for word in words)],
        cwd=home / "work",
        env={"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", **told},
        stdin=subprocess.DEVNULL,
    )


def at_once(package: str, api: str, template: str) -> Row:
    """What became of a library's turns."""
    with session(template) as (served, home), left_out() as warnings:
        program = FOLDER / "libraries" / "bin" / "python"
        printed = _printed(
            [str(program), str(FILES / "library_session.py"), f"{package} {api}", served.url],
            input=json.dumps([asked(turn, CALL) for turn in TURNS]),
            cwd=home / "work",
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # instead of a download
        )
        lines = (line for line in printed.splitlines() if line.startswith('"'))
        said = [json.loads(line) for line in lines]  # litellm prints advice of its own
        n_answered = sum(t.answered(text, home / "work") for t, text in zip(TURNS, said))
        return _row(package, api, template, n_answered, served, warnings)


@contextlib.contextmanager
def left_out() -> Iterator[set[str]]:
    """What the server says that it leaves out of requests, each once."""
    found: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: found.add(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def _printed(words: list[str], **options: Any) -> str:
    """What a program prints, as far as it comes in time."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, **options)
    except subprocess.TimeoutExpired as error:
        print(f"{words[0]}: no end after {TIMEOUT} s", flush=True)
        return (error.stdout or b"").decode()
    print(f"{words[0]}: {(done.stderr or done.stdout).strip()[-1000:]}", flush=True)
    return done.stdout


def _row(
    client: str, api: str, template: str, n_answered: int, served: Served, warnings: set[str]
) -> Row:
    metrics = served.client.get("/metrics").text.splitlines()
    refused = [x for x in metrics if 'status="4' in x and "_total" in x]
    return {
        "client": client,
        "api": api,
        "template": template,
        "turns": len(TURNS),
        "answered": n_answered,
        "refused": int(sum(float(line.split()[-1]) for line in refused)),
        "warnings": sorted(x.removeprefix(OF_A_REQUEST) for x in warnings if OF_A_REQUEST in x),
    }


def install() -> dict[str, str]:
    """The agents and libraries, at their newest; their versions."""
    packages = [agent.package for agent in AGENTS if "node_modules" in agent.program]
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", *packages], cwd=FOLDER, check=True)
    about = {name: FOLDER / "node_modules" / name / "package.json" for name in packages}
    versions = {name: json.loads(path.read_text())["version"] for name, path in about.items()}
    return versions | installed("libraries", PACKAGES) | installed("aider", ["aider-chat"])


def installed(folder: str, packages: list[str]) -> dict[str, str]:
    """Packages of pip's in a virtual environment; their versions."""
    subprocess.run([sys.executable, "-m", "venv", FOLDER / folder], check=True)
    pip = [FOLDER / folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, stdout=subprocess.PIPE)
    found = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
    return {name: found[name] for name in packages}


def main() -> None:
    options(__doc__).parse_args()
    result = Result(ROOT / "docs" / "agents", clients=install())
    for template in TEMPLATES:
        for package, api in CLIENTS:
            result.add(at_once(package, api, template))
    for template in TEMPLATES:
        for agent in AGENTS:
            result.add(turn_by_turn(agent, template))


if __name__ == "__main__":
    main()
