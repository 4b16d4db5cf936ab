"""Mutation testing of the mathematics: `python -m tests.mutants [--jobs N] [module ...]`.

Each target module is changed in one place (an operator, a comparison, a constant, a sign, a removed detach,
mask, clamp or where), and the tests of that module must fail. A change that none of them notices is printed
and makes the exit status 1, unless infra/mutants-explained.toml says why it cannot be noticed. An entry there
that no surviving change matches any longer is an error too.

Everything happens in one process: the tests are collected once, each mutant is a fork in which the changed
source is executed into the module that the tests have imported. The parent never runs autograd, so that
children may.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import inspect
import os
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "infra" / "mutants-explained.toml"
TARGETS: dict[str, tuple[str, ...]] = {
    "training.losses": ("tests/training/test_losses.py",),
    "training.advantages": ("tests/training/test_advantages.py",),
    "training.kl": ("tests/training/test_kl.py",),
    "training.rewards": ("tests/training/test_rewards.py",),
    "training.experience": ("tests/training/test_experience.py",),
    "training.logprobs": tuple(
        f"tests/training/test_logprobs{part}.py" for part in ("", "_edges", "_frozen", "_learned")
    ),
}
PARTS: dict[str, frozenset[str]] = {
    "training.experience": frozenset(
        {"__call__", "_faults", "_compose", "_whiten", "_adjust", "column_of", "dimension_weights"}
    )
}
"""Of a module with other matters too, the functions that are mathematics."""
CPU_LIMIT_S = 60  # of a mutant that runs in circles; CPU time, so that a paused machine kills none

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
SWAPS = {"minimum": "maximum", "amin": "amax", "argmin": "argmax", "min": "max"}
SWAPS |= {second: first for first, second in SWAPS.items()}
DROPPED_CALLS = {"detach", "clamp", "sqrt", "square", "exp", "flip", "double", "mul"}
MASKS = ("mask", "weight", "valid", "counts", "known")


@dataclass(frozen=True)
class Mutant:
    """One change: put `replacement` where `owner.attribute[index]` is."""

    module: str
    function: str
    line: int
    change: str
    owner: ast.AST = field(repr=False)
    attribute: str
    index: int | None
    replacement: object = field(repr=False)

    @property
    def key(self) -> tuple[str, str]:
        return f"{self.module}.{self.function}".rstrip("."), self.change

    def put(self, node: object) -> object:
        """Place a node (or operator, or value) and return what stood there."""
        if self.index is None:
            before = getattr(self.owner, self.attribute)
            setattr(self.owner, self.attribute, node)
        else:
            before = getattr(self.owner, self.attribute)[self.index]
            getattr(self.owner, self.attribute)[self.index] = node
        return before


# -- making mutants ----------------------------------------------------------------------------------------


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    match node:
        case ast.BinOp(left, op, right):
            if type(op) in BINARY:
                yield ast.BinOp(left, BINARY[type(op)](), right)
            if isinstance(op, ast.Mult | ast.BitAnd):
                yield from (b for a, b in ((left, right), (right, left)) if _is_mask(a))
        case ast.Compare(left, [op], right):
            yield from (ast.Compare(left, [other()], right) for other in COMPARISONS.get(type(op), ()))
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield from (ast.Constant(other) for other in (value + 1, value - 1) if other >= 0)
        case ast.Constant(float() as value):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Attribute(ast.Name("math"), "inf"):
            yield ast.Constant(1.5)
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call(ast.Attribute(ast.Name("torch"), "where"), [_, first, second]):
            yield from (first, second)
        case ast.Call(ast.Attribute(value, name, context), arguments, keywords):
            if name in DROPPED_CALLS and ast.unparse(value) not in ("math", "torch"):
                yield value
            if name in SWAPS:
                yield ast.Call(ast.Attribute(value, SWAPS[name], context), arguments, keywords)
        case ast.Call(ast.Name(name), arguments, keywords) if name in SWAPS:
            yield ast.Call(ast.Name(SWAPS[name], ast.Load()), arguments, keywords)


def _is_mask(node: ast.AST) -> bool:
    return any(part in ast.unparse(node).rsplit(".", 1)[-1] for part in MASKS) and not isinstance(
        node, ast.BinOp
    )


def mutants(module: str, tree: ast.Module) -> list[Mutant]:
    """All changes of a module's code; annotations, docstrings and strings are left alone."""
    found: list[Mutant] = []

    def visit(owner: ast.AST, function: str, expression: ast.AST | None) -> None:
        for attribute, value in ast.iter_fields(owner):
            if attribute in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            nodes = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, node in nodes:
                if not isinstance(node, ast.AST):
                    continue
                inner = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else function
                named = (
                    ast.get_docstring(owner, clean=False)
                    if isinstance(owner, ast.Module | ast.FunctionDef | ast.ClassDef)
                    else None
                )
                if named is not None and index == 0 and attribute == "body":
                    continue
                around = expression if isinstance(node, ast.expr | ast.keyword) else None
                for replacement in replacements(node):
                    found.append(
                        _described(module, inner, owner, attribute, index, node, replacement, around)
                    )
                visit(node, inner, _wider(node, around))

    visit(tree, "", None)
    return found


def _wider(node: ast.AST, around: ast.AST | None) -> ast.AST | None:
    """The expression that names a place: small ones are shown with what stands around them."""
    if not isinstance(node, ast.expr):
        return around if isinstance(node, ast.keyword) else None
    return node if around is None or len(ast.unparse(around)) > 60 else around


def _described(
    module: str,
    function: str,
    owner: ast.AST,
    attribute: str,
    index: int | None,
    node: ast.AST,
    replacement: ast.AST,
    around: ast.AST | None,
) -> Mutant:
    bare = Mutant(module, function, getattr(node, "lineno", 0), "", owner, attribute, index, replacement)
    if isinstance(owner, ast.arguments):
        names = [a.arg for a in (owner.kwonlyargs if attribute == "kw_defaults" else owner.args)]
        place = names[index if attribute == "kw_defaults" else (index or 0) - len(owner.defaults)]  # type: ignore[index]
        change = f"{place}={ast.unparse(node)} -> {place}={ast.unparse(replacement)}"
    elif around is None or len(ast.unparse(node)) > 30:
        change = f"{ast.unparse(node)} -> {ast.unparse(replacement)}"
    else:
        before = ast.unparse(around)
        bare.put(replacement)
        change = f"{before} -> {ast.unparse(around)}"
        bare.put(node)
    return Mutant(module, function, bare.line, change, owner, attribute, index, replacement)


# -- running them ------------------------------------------------------------------------------------------


def install(mutant: Mutant, tree: ast.Module) -> None:
    """Execute the changed source in the imported module, and give its functions to all who imported them."""
    mutant.put(mutant.replacement)
    module = sys.modules[mutant.module]
    before = dict(vars(module))
    exec(compile(ast.fix_missing_locations(tree), f"<{mutant.change}>", "exec"), vars(module))
    after = vars(module)
    changed = {id(old): after[name] for name, old in before.items() if after[name] is not old}
    for name, other in list(sys.modules.items()):
        if name.startswith(("training.", "tests.")) and other is not module:
            for key, value in list(vars(other).items()):
                if id(value) in changed and not key.startswith("__"):
                    setattr(other, key, changed[id(value)])


def sources(items: list[pytest.Item]) -> dict[pytest.Item, tuple[str, bool]]:
    """Of each test its source, and whether it draws random inputs."""
    found = {}
    for item in items:
        test = getattr(item, "function", None)
        random = hasattr(test, "hypothesis")
        text = inspect.getsource(test.hypothesis.inner_test if random else test) if test else ""
        found[item] = (item.name + text, random)
    return found


def likely_first(tests: dict[pytest.Item, tuple[str, bool]], function: str) -> list[pytest.Item]:
    """Tests that name the changed function, then the others; literals before random inputs, the slower."""
    return sorted(tests, key=lambda item: (function not in tests[item][0], tests[item][1]))


def survives(items: list[pytest.Item]) -> bool:
    """Run tests until one fails. Without pytest's reports: nobody reads the traceback of a killed mutant."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        state = item.session._setupstate
        try:
            state.setup(item)
            item.runtest()
            state.teardown_exact(following)
        except pytest.skip.Exception:
            state.teardown_exact(following)
        except Exception:
            return False
    return True


class Campaign:
    """A pytest plugin that runs every mutant in place of the plain test loop."""

    def __init__(self, modules: list[str], jobs: int) -> None:
        self.modules, self.jobs = modules, jobs
        self.survivors: list[Mutant] = []
        self.rows: list[tuple[str, int, int, float]] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Hook: the tests are collected."""
        # torch.testing.assert_close imports it at its first use: once here, not once a fork.
        importlib.import_module("torch.distributed.tensor")
        for module in self.modules:
            files = [ROOT / path for path in TARGETS[module]]
            items = [item for item in session.items if item.path in files]
            # pytest takes a test's folder away by its reports, and there are none; files are no mathematics.
            self.campaign(
                module, [item for item in items if "tmp_path" not in getattr(item, "fixturenames", ())]
            )
        return True

    def campaign(self, module: str, items: list[pytest.Item]) -> None:
        """All mutants of a module, `jobs` at a time."""
        started = time.monotonic()
        tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8"))
        todo, tests = mutants(module, tree), sources(items)
        parts = PARTS.get(module)
        todo = [mutant for mutant in todo if parts is None or mutant.function in parts]
        gc.freeze()  # a collection in a child would touch, and so copy, all of the parent's memory
        if _wait(_fork(items, None, tree)) != 0:
            raise SystemExit(f"the tests of {module} fail without any change: mend them first (make test)")
        running: list[tuple[Mutant, int]] = []
        left = list(reversed(todo))
        lived: list[Mutant] = []
        while left or running:
            while left and len(running) < self.jobs:
                mutant = left.pop()
                running.append((mutant, _fork(likely_first(tests, mutant.function), mutant, tree)))
            mutant, pid = running.pop(0)
            if _wait(pid) == 0:
                lived.append(mutant)
                print(
                    f"  survives  {mutant.function}:{mutant.line}  {mutant.change}",
                    flush=True,
                )
        self.survivors += lived
        self.rows.append((module, len(todo), len(lived), time.monotonic() - started))


def _fork(items: list[pytest.Item], mutant: Mutant | None, tree: ast.Module) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        gc.disable()
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            if mutant is not None:
                install(mutant, tree)
            status = 0 if survives(items) else 1
        finally:
            os._exit(status)
    return pid


def _wait(pid: int) -> int:
    """Exit status of a child; negative when its limit of CPU time ended it, which counts as killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- the verdict -------------------------------------------------------------------------------------------


def explained() -> dict[tuple[str, str], str]:
    """The committed list: (where, change) -> why no test can see it."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("mutant", [])
    return {(entry["where"], entry["change"]): entry["why"] for entry in entries}


def report(campaign: Campaign) -> int:
    """Print the table and what is open; the exit status."""
    known = explained()
    open_ones = [mutant for mutant in campaign.survivors if mutant.key not in known]
    alive = {mutant.key for mutant in campaign.survivors}
    stale = [key for key in known if key not in alive and ".".join(key[0].split(".")[:2]) in campaign.modules]
    count = Counter(mutant.module for mutant in open_ones)
    print(f"\n{'module':<22}{'mutants':>9}{'killed':>9}{'explained':>11}{'open':>7}{'seconds':>10}")
    for module, total, lived, seconds in campaign.rows:
        unexplained = count[module]
        explained_here = lived - unexplained
        print(f"{module:<22}{total:>9}{total - lived:>9}{explained_here:>11}{unexplained:>7}{seconds:>10.1f}")
    for mutant in open_ones:
        print(f"OPEN   {mutant.module}.{mutant.function}, line {mutant.line}: {mutant.change}")
    for where, change in stale:
        print(f"STALE  {where}: {change} (no survivor matches; take it out of {EXPLAINED.relative_to(ROOT)})")
    return 1 if open_ones or stale else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    options = parser.parse_args()
    modules = options.modules or list(TARGETS)
    unknown = [name for name in modules if name not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; choose from {', '.join(TARGETS)}")
    os.chdir(ROOT)
    campaign = Campaign(modules, options.jobs)
    arguments = ["-s", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "-m", "not slow"]
    paths = [path for name in modules for path in TARGETS[name]]
    code = pytest.main([*arguments, *paths], plugins=[campaign])
    if len(campaign.rows) < len(modules):
        print(f"the tests could not be collected or run (pytest ended with {code})")
        return 1
    return report(campaign)


if __name__ == "__main__":
    raise SystemExit(main())
