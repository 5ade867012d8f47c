"""What coding agents do with the server: they are installed with npm, use their tools, and outgrow the context.

    python scripts/try_agents.py      # writes docs/agents.json; then: make docs; needs npm

The embedded model can't program, so it is made to say what the user asks for. All else is real: the agents, their
prompts, HTTP, what is read of the prompts and what was known of them, and the calls that the server finds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results_page import ROOT, Result, options

sys.path.insert(0, str(ROOT / "tests"))
from acting_server import SAY, acting
from server_helpers import Limits, Served

FOLDER = ROOT / "build" / "agents"  # of npm's
FILES = ROOT / "scripts" / "agents"
CONTEXT = 24_000  # tokens of a prompt, at most
NOTES = "".join(f"Note {n}: nothing of what is written here matters.\n" for n in range(330))
END = " END"  # of what the model is to say; agents put words of their own behind it
SUMMARY = re.compile("detailed summary|handoff summary|summary of the conversation", re.I)
TIMEOUT = 400  # seconds of a turn


@dataclass
class Agent:
    """A program of npm's under node_modules, the address that it asks, and how it is used.

    Attributes:
        new, again: the words before a prompt, of a new conversation and of one that goes on.
        tool: the call that runs a command, with ~ for quotes, which some agents escape.
        files: by name in its home folder, those of `agents/`; in them and in the `environment`, SERVER is the address.
    """

    package: str
    api: str
    program: str
    new: list[str]
    again: list[str]
    tool: str
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


CLAUDE = ["--model", "local", "--allowedTools=Bash"]
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
OPENCODE = ["run", "-m", "local/local"]
AGENTS = [
    Agent(
        "@anthropic-ai/claude-code",
        "/v1/messages",
        ".bin/claude",
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
        ".bin/codex",
        ["exec", *CODEX],
        ["exec", "resume", "--last", *CODEX],
        "{~name~: ~exec_command~, ~arguments~: {~cmd~: ~COMMAND~}}",
        {".codex/config.toml": "codex.toml"},
    ),
    Agent(
        "opencode-ai",
        "/v1/chat/completions",
        "opencode-linux-x64/bin/opencode" if sys.platform == "linux" else ".bin/opencode",
        OPENCODE,
        [*OPENCODE, "-c"],
        "{~name~: ~bash~, ~arguments~: {~command~: ~COMMAND~, ~description~: ~a command~}}",
        {".config/opencode/opencode.json": "opencode.json"},
    ),
]


def what_to_say(prompt: str) -> str:
    """What the last message asks for."""
    last = prompt.rpartition("<|user|>")[2]
    _, asked, text = last.rpartition(SAY)
    text, _, behind = text.partition(END)
    if SUMMARY.search(behind if asked else last):
        return "<analysis>Notes.</analysis><summary>Notes were read.</summary>"
    done = not asked or "<|tool|>" in last
    return "It is done." if done else text.strip().replace("~", '"')


def tried(agent: Agent) -> dict[str, Any]:
    """What became of an agent's six turns."""
    limits = Limits(context=CONTEXT)
    with tempfile.TemporaryDirectory() as home, acting(what_to_say, limits=limits) as served:
        prompts = served.prompts
        work = Path(home) / "work"
        work.mkdir()
        (work / "notes.txt").write_text(NOTES)
        for name, ours in agent.files.items():
            file, text = Path(home) / name, (FILES / ours).read_text()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("SERVER", served.url).replace("24000", str(CONTEXT)))
        call = f"<think>A tool will do.</think><tool_call>{agent.tool}</tool_call>"
        make, read = (call.replace("COMMAND", c) for c in ("echo made > made.txt", "cat notes.txt"))
        said, starts = [], []
        for turn, text in enumerate(["hello", make, read, read, "still here", "and on"]):
            starts.append(len(prompts))
            words = agent.again if turn else agent.new
            said.append(_turn(agent, [*words, f"{SAY}{text}{END}"], home, served))
        metrics = served.client.get("/metrics").text.splitlines()
        refused = [x for x in metrics if 'status="400"' in x and "_total" in x]
        second = prompts[starts[1] : starts[2]] or [(0, 0)]  # if the agent has failed
        lengths = [n for n, _ in prompts] or [0]
        return {
            "package": agent.package,
            "api": agent.api,
            "answered": "hello" in said[0],
            "tool_ran": (work / "made.txt").exists(),
            "second_turn": second[0],
            "longest": max(lengths),
            "refused": int(sum(float(line.split()[-1]) for line in refused)),
            "after": lengths[-1],
            "still_answers": "and on" in said[-1],
        }


def _turn(agent: Agent, words: list[str], home: str, served: Served) -> str:
    """What an agent prints."""
    told = {name: text.replace("SERVER", served.url) for name, text in agent.environment.items()}
    done = subprocess.run(
        [str(FOLDER / "node_modules" / agent.program), *words],
        cwd=Path(home) / "work",
        env={"HOME": home, "PATH": os.environ["PATH"], "TERM": "dumb", **told},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    print(f"{agent.package}: {(done.stdout or done.stderr).strip()[-200:]!r}", flush=True)
    return done.stdout


def main() -> None:
    options(__doc__).parse_args()
    packages = [agent.package for agent in AGENTS]
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", *packages], cwd=FOLDER, check=True)
    about = {name: FOLDER / "node_modules" / name / "package.json" for name in packages}
    versions = {name: json.loads(path.read_text())["version"] for name, path in about.items()}
    result = Result(ROOT / "docs" / "agents", agents=versions)
    for agent in AGENTS:
        result.add(tried(agent))


if __name__ == "__main__":
    main()
