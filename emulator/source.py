"""Reads kernel source: what the NKI compiler refuses or what changed between NKI 0.3 and 0.7, by line.

Sources: NKI release notes and migration guide, language guide, dynamic-loop guide. It knows syntax and names, not
values; what a kernel does with values is checked when it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSIONS = ("0.3", "0.4", "0.5", "0.6", "0.7")
_NONE = ("", "")

# Names of nl, nisa and nki.collectives: first and last version that has them; ("", "") for none.
_NAMES = {
    "dynamic_range": ("0.3", "0.6", "nl.fori_loop replaces it"),
    "fori_loop": ("0.6", "0.7", ""),
    "while_loop": ("0.6", "0.7", ""),
    "topk": ("0.6", "0.7", ""),
    "all_gather_v": ("0.6", "0.7", ""),
    "abs_max": ("0.4", "0.7", "needs trn3"),
    "abs_min": ("0.4", "0.7", "needs trn3"),
    "activate2": ("0.4", "0.7", "needs trn3"),
    "float8_e8m0fnu": ("0.5", "0.7", "needs trn3"),
    "tensor_copy_dynamic_src": ("0.3", "0.3", ".ap(scalar_offset=) replaces it"),
    "tensor_copy_dynamic_dst": ("0.3", "0.3", ".ap(scalar_offset=) replaces it"),
    **{
        name: (*_NONE, "gone since the NKI compiler (Beta 2)")
        for name in ("arange", "mgrid", "par_dim", "benchmark", "baremetal", "profile", "simulate_kernel")
    },
}
# Methods of tensors since NKI 0.5. Classes of a kernel may have methods of these names: see _Reader.
_METHODS = (
    "permute broadcast expand_dim squeeze_dim reshape_dim flatten_dims rearrange select vector_select get_pattern "
    "is_contiguous is_indirect"
)
# Keywords by the function that takes them ("" for any instruction).
_KEYWORDS = {
    ("", "mask"): (*_NONE, "gone since the NKI compiler (Beta 2)"),
    ("nc_matmul", "psumAccumulateFlag"): (*_NONE, "accumulate= replaces it"),
    ("nc_matmul", "is_moving_zero"): (*_NONE, "is_moving_onezero= replaces it"),
    ("sendrecv", "use_gpsimd_dma"): (*_NONE, "dma_engine= replaces it"),
    ("register_move", "imm"): (*_NONE, "src= replaces it"),
    ("dma_copy", "dst_rmw_op"): (*_NONE, "nisa.dma_compute replaces it"),
    ("dma_copy", "unique_indices"): (*_NONE, "nisa.dma_compute replaces it"),
    ("dma_copy", "priority"): ("0.6", "0.7", "needs trn3"),
    ("dma_transpose", "priority"): ("0.6", "0.7", "needs trn3"),
    ("dma_compute", "oob_mode"): ("0.4", "0.7", ""),
    ("tensor_scalar_reduce", "reduce_cmd"): ("0.6", "0.7", ""),
    ("tensor_scalar_reduce", "reduce_init"): ("0.6", "0.7", ""),
    ("tensor_scalar_reduce", "reduce_res_negate"): ("0.6", "0.7", ""),
    ("jit", "platform_target"): (*_NONE, "NEURON_PLATFORM_TARGET_OVERRIDE replaces it"),
}
_ENUMS = ("engine", "dge_mode", "oob_mode", "reduce_cmd", "perf_mode", "dma_engine")


@dataclass(frozen=True)
class Finding:
    """A construct and the versions in which it is legal; none if ``first`` is empty."""

    line: int
    text: str
    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.text} [{_range(self.first, self.last)}]"


def _range(first: str, last: str) -> str:
    if not first:
        return "no NKI from 0.3 on"
    return f"NKI {first}" if first == last else f"NKI {first} to {last}"


def _without_neuronxcc(name: str) -> str:
    """nki.isa of neuronxcc.nki.isa, as it was called up to NKI 0.3."""
    return name.removeprefix("neuronxcc.") if name.startswith("neuronxcc.nki") else name


class _Reader(ast.NodeVisitor):
    """Collects findings. Language rules hold in functions, which are compiled; module code is Python's."""

    def __init__(self, tree: ast.Module):
        self.findings: list[Finding] = []
        self._functions: list[ast.FunctionDef] = []
        # Modules of NKI, and what the names of this file stand for: nl is nki.language, however it was imported.
        self._modules: set[str] = {"nki", "nki.isa", "nki.language", "nki.collectives"}
        self._stands_for: dict[str, str] = {"nki": "nki", "nl": "nki.language", "nisa": "nki.isa"}
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in imports for alias in node.names} | {getattr(n, "module", "") for n in imports}
        for node in imports:
            self._learn(node)
        # Torch's tensors, nki-library's TensorView and the classes of this file have methods of the same names.
        self._methods = set() if names & {"torch", "TensorView"} else set(_METHODS.split()) - own
        self._registers = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).partition("(")[0].endswith("register_alloc")
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def find(self, node: ast.AST, text: str, first: str, last: str, hint: str = "") -> None:
        self.findings.append(Finding(node.lineno, f"{text}: {hint}" if hint else text, first, last))

    def _learn(self, node: ast.Import | ast.ImportFrom) -> None:
        """Note the names that an import of NKI brings. Before the visit: a function may use an import below it."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = _without_neuronxcc(alias.name)
                if name.split(".")[0] == "nki":
                    self._modules.add(name)
                    if alias.asname:
                        self._stands_for[alias.asname] = name
            elif not node.level:
                name = _without_neuronxcc(f"{node.module}.{alias.name}")
                if name.split(".")[0] == "nki":
                    self._stands_for[alias.asname or alias.name] = name

    def _resolved(self, node: ast.AST) -> str:
        """What a name or an attribute of a module of NKI stands for, such as nki.isa.nc_matmul; else empty."""
        if isinstance(node, ast.Name):
            return self._stands_for.get(node.id, "")
        if isinstance(node, ast.Attribute) and (module := self._resolved(node.value)) in self._modules:
            return f"{module}.{node.attr}"
        # neuronxcc.nki.isa without a name of its own.
        of_neuronxcc = getattr(node, "attr", "") == "nki" and getattr(node.value, "id", "") == "neuronxcc"
        return "nki" if of_neuronxcc else ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in dict.fromkeys((node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))):
            if name.startswith("neuronxcc.nki"):
                self._import(node, name)
                break
        if _without_neuronxcc(node.module or "").split(".")[0] == "nki":
            for alias in node.names:
                self._name(node, alias.name)

    def _import(self, node: ast.AST, name: str) -> None:
        if name.startswith("neuronxcc.nki") and not name.startswith("neuronxcc.nki.typing"):
            self.find(node, f"import of {name}", "0.3", "0.3", "an error inside kernels since 0.4")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.args.kwonlyargs and node.args.vararg is None and self._is_kernel(node):
            self.find(
                node, "a bare * in the signature of a kernel", "0.7", "0.7", "the parser of 0.3 to 0.6 refuses it"
            )
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._functions.append(node)
        for child in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if child is not None:
                self.visit(child)
        self._functions.pop()

    def _is_kernel(self, node: ast.FunctionDef) -> bool:
        parts = (part for decorator in node.decorator_list for part in ast.walk(decorator))
        return any(self._resolved(part) == "nki.jit" for part in parts if isinstance(part, (ast.Name, ast.Attribute)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._resolved(node.value) in self._modules:
            self._name(node, node.attr)
        self.generic_visit(node)

    def _name(self, node: ast.AST, name: str) -> None:
        if name in _NAMES:
            first, last, hint = _NAMES[name]
            self.find(node, name, first, last, hint)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = self._resolved(function).rpartition(".")[2]
        if name:
            for keyword in node.keywords:
                for key in ((name, keyword.arg), ("", keyword.arg)):
                    if key in _KEYWORDS:
                        first, last, hint = _KEYWORDS[key]
                        self.find(node, f"{name}({keyword.arg}=)", first, last, hint)
                constant = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, int)
                if keyword.arg in _ENUMS and constant:
                    self.find(
                        node, f"{name}({keyword.arg}={keyword.value.value})", *_NONE, "a member of the enumeration"
                    )
                if keyword.arg == "buffer" and isinstance(getattr(keyword.value, "value", None), str):
                    self.find(node, f"{name}(buffer={keyword.value.value!r})", *_NONE, "nl.sbuf, nl.psum, ...")
        elif isinstance(function, ast.Attribute) and self._functions:
            of_self = isinstance(function.value, ast.Name) and function.value.id == "self"
            if function.attr in self._methods and not of_self:
                self.find(node, f"tensor.{function.attr}()", "0.5", "0.7")
            elif function.attr == "indirect":
                self.find(node, "tensor.indirect()", "0.5", "0.7", "needs trn3")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if self._functions and isinstance(node.test, ast.Name) and node.test.id in self._registers:
            self.find(node, f"while {node.test.id}:", "0.3", "0.6", "on a register; nl.while_loop replaces it")
        self.generic_visit(node)

    def _parser(self, node: ast.AST, what: str) -> None:
        if self._functions:
            self.find(node, what, "0.7", "0.7", "the parser of 0.3 to 0.6 refuses it")

    def visit_Yield(self, node: ast.Yield) -> None:
        self._parser(node, "yield")
        self.generic_visit(node)

    visit_YieldFrom = visit_Await = visit_Yield

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._parser(node, "a generator expression")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        if bases - {"NKIObject", "Enum", "IntEnum", "NamedTuple", "object"}:
            self.find(
                node, f"class {node.name}({', '.join(sorted(bases))})", "0.7", "0.7",
                "0.3 to 0.6 know classes that derive from NKIObject or Enum",
            )  # fmt: skip
        self.generic_visit(node)


def findings(text: str) -> list[Finding]:
    """All constructs of a source that not every version from 0.3 to 0.7 accepts.

    Raises:
        SyntaxError: the text is not Python.
    """
    tree = ast.parse(text)
    reader = _Reader(tree)
    reader.visit(tree)
    return sorted(reader.findings, key=lambda found: found.line)


def versions(found: list[Finding]) -> list[str]:
    """The versions in which a file with these findings is legal."""
    legal = list(VERSIONS)
    for one in found:
        legal = [v for v in legal if one.first and one.first <= v <= one.last]
    return legal


def lines(file: str) -> Iterator[str]:
    """The report on one file: the verdict, and a line for each finding.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no text.
    """
    text = Path(file).read_text(encoding="utf-8-sig")
    if "\0" in text:  # some versions of Python call this a syntax error without a line
        raise ValueError("not a text: it has null bytes")
    try:
        found = findings(text)
    except SyntaxError as error:
        yield f"{file}:{error.lineno}: not Python: {error.msg}"
        yield f"{file}: legal in no NKI"
        return
    yield from (f"{file}:{one.line}: {one}" for one in found)
    legal = versions(found)
    yield f"{file}: legal in {_range(legal[0], legal[-1]) if legal else _range('', '')}"


def report(files: list[str]) -> int:
    """Print the report; 1 if a file is legal nowhere or cannot be read."""
    status = 0
    for file in files:
        try:
            for line in lines(file):
                print(line)
        except (OSError, ValueError) as error:
            line = f"{file}: {_reason(error)}"
            print(line)
            status = 1
        status |= line.startswith(f"{file}: legal in no NKI")
    return status


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
    return getattr(error, "strerror", None) or str(error)
