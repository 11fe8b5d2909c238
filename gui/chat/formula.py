r"""Formulas in plain letters: `\frac{a}{b} \le x^2` becomes a/b ≤ x². What is not known stays as it was written."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["readable"]

_MOST = 4000  # characters; a longer formula is shown as written
_DEEPEST = 30

_TABLE = """
alpha α  beta β  gamma γ  delta δ  epsilon ϵ  varepsilon ε  zeta ζ  eta η  theta θ  vartheta ϑ  iota ι
kappa κ  lambda λ  mu μ  nu ν  xi ξ  pi π  varpi ϖ  rho ρ  varrho ϱ  sigma σ  varsigma ς  tau τ  upsilon υ
phi ϕ  varphi φ  chi χ  psi ψ  omega ω  Gamma Γ  Delta Δ  Theta Θ  Lambda Λ  Xi Ξ  Pi Π  Sigma Σ  Upsilon Υ
Phi Φ  Psi Ψ  Omega Ω  times ×  div ÷  cdot ·  ast ∗  star ⋆  pm ±  mp ∓  circ ∘  bullet •  oplus ⊕
otimes ⊗  odot ⊙  wedge ∧  vee ∨  cap ∩  cup ∪  setminus ∖  le ≤  leq ≤  ge ≥  geq ≥  ll ≪  gg ≫  ne ≠
neq ≠  equiv ≡  sim ∼  simeq ≃  approx ≈  cong ≅  propto ∝  mid ∣  parallel ∥  perp ⊥  in ∈  notin ∉  ni ∋
subset ⊂  subseteq ⊆  supset ⊃  supseteq ⊇  emptyset ∅  varnothing ∅  forall ∀  exists ∃  nexists ∄  neg ¬
lnot ¬  land ∧  lor ∨  top ⊤  bot ⊥  vdash ⊢  models ⊨  to →  rightarrow →  leftarrow ←  leftrightarrow ↔
Rightarrow ⇒  Leftarrow ⇐  Leftrightarrow ⇔  implies ⇒  iff ⇔  mapsto ↦  uparrow ↑  downarrow ↓
longrightarrow ⟶  hookrightarrow ↪  rightleftharpoons ⇌  gets ←  sum ∑  prod ∏  coprod ∐  int ∫  iint ∬
iiint ∭  oint ∮  partial ∂  nabla ∇  infty ∞  hbar ℏ  ell ℓ  Re ℜ  Im ℑ  aleph ℵ  angle ∠  triangle △
square □  blacksquare ■  checkmark ✓  dagger †  ddagger ‡  prime ′  degree °  ldots …  cdots ⋯  dots …
vdots ⋮  ddots ⋱  lfloor ⌊  rfloor ⌋  lceil ⌈  rceil ⌉  langle ⟨  rangle ⟩  lvert |  rvert |  lVert ‖
rVert ‖  vert |  Vert ‖  therefore ∴  because ∵  colon :  backslash \\  lbrace {  rbrace }
"""
_SIGNS: dict[str, str] = dict(re.findall(r"(\S+) (\S+)", _TABLE))
_SPACES = {"quad": "  ", "qquad": "    ", ",": " ", ":": " ", ";": " ", " ": " ", "!": "", "left": "", "right": ""}
_SPACES |= dict.fromkeys(
    ("big", "Big", "bigg", "Bigg", "bigl", "bigr", "displaystyle", "limits", "nolimits", "textstyle"), ""
)
_WORDS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf det dim ker"
        " gcd arg mod Pr deg hom argmax argmin",
    )
)
_FONTS = {"text", "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "operatorname", "textbf", "textit", "boldsymbol"}
_FONTS |= {"mathcal", "mbox", "bm", "textrm", "mathfrak"}
_MARKS = {"hat": "\u0302", "bar": "\u0304", "overline": "\u0304", "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308"}
_MARKS |= {"tilde": "\u0303", "widehat": "\u0302", "widetilde": "\u0303"}
_DOUBLE = dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True))
_UPPER = dict(zip("0123456789+-=()abcdefghijklmnoprstuvwxyzTABDEGHIJKLMNOPRUVW′∗",
                  "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵁⱽᵂ′*", strict=True))  # fmt: skip
_LOWER = dict(zip("0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
_TOKEN = re.compile(r"\\([a-zA-Z]+|.)|(\s+)|(.)", re.DOTALL)


def readable(source: str) -> str:
    """A formula, without its dollar signs or brackets, as one can read it in a line of text."""
    if len(source) > _MOST:
        return source
    try:
        return re.sub(r" {2,}", " ", _Reader(source).all()).strip()
    except RecursionError:
        return source


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens = [match.groups() for match in _TOKEN.finditer(source)]
        self._at = 0
        self._depth = 0

    def all(self) -> str:
        """Everything; a closing brace too many is a brace."""
        said = self._until("")
        while self._at < len(self._tokens):
            self._at += 1
            said += "}" + self._until("")
        return said

    def _until(self, end: str) -> str:
        said = ""
        while self._at < len(self._tokens):
            name, space, letter = self._tokens[self._at]
            if letter == "}":
                if end:
                    self._at += 1
                return said
            self._at += 1
            if space is not None:
                said += " "
            elif name is not None:
                said += self._command(name)
            elif letter in "^_":
                said += self._script(letter)
            elif letter == "{":
                said += self._nested()
            elif letter == "&":
                said += " "
            else:
                said += "′" if letter == "'" else letter
        return said

    def _nested(self) -> str:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise RecursionError
        said = self._until("}")
        self._depth -= 1
        return said

    def _skip_space(self) -> None:
        while self._at < len(self._tokens) and self._tokens[self._at][1] is not None:
            self._at += 1

    def _argument(self) -> str:
        """What a command applies to: a group, a command or a letter."""
        self._skip_space()
        if self._at >= len(self._tokens):
            return ""
        name, _space, letter = self._tokens[self._at]
        if letter == "}":
            return ""
        self._at += 1
        if name is not None:
            return self._command(name)
        return self._nested() if letter == "{" else letter

    def _command(self, name: str) -> str:
        if name in _SIGNS:
            if _SIGNS[name].isalpha():  # the space behind a letter only ends its name
                self._skip_space()
            return _SIGNS[name]
        if name in _SPACES:
            return _SPACES[name]
        if name in _WORDS:
            self._skip_space()
            return f"{name} "
        if name in _FONTS:
            return self._argument()
        if name in _MARKS:
            inner = self._argument()
            return inner + _MARKS[name] if len(inner) == 1 else inner
        special: dict[str, Callable[[], str]] = {
            "frac": self._fraction,
            "dfrac": self._fraction,
            "tfrac": self._fraction,
            "binom": lambda: f"C({self._argument()}, {self._argument()})",
            "sqrt": self._root,
            "mathbb": lambda: "".join(_DOUBLE.get(letter, letter) for letter in self._argument()),
            "begin": lambda: (self._argument(), "")[1],
            "end": lambda: (self._argument(), "")[1],
            "boxed": self._argument,
            "\\": lambda: "\n",
        }
        if name in special:
            return special[name]()
        return name if len(name) == 1 and not name.isalpha() else f"\\{name} "

    def _fraction(self) -> str:
        above, below = self._argument(), self._argument()
        return f"{_grouped(above)}/{_grouped(below)}"

    def _root(self) -> str:
        sign = "√"
        if self._at < len(self._tokens) and self._tokens[self._at][2] == "[":
            self._at += 1
            degree = ""
            while self._at < len(self._tokens) and self._tokens[self._at][2] != "]":
                degree += self._argument()
            self._at += 1
            sign = {"3": "∛", "4": "∜"}.get(degree, _raised(degree, _UPPER, "^") + "√")
        return sign + _grouped(self._argument())

    def _script(self, sign: str) -> str:
        return _raised(self._argument().strip(), _UPPER if sign == "^" else _LOWER, sign)


def _raised(text: str, letters: dict[str, str], sign: str) -> str:
    """In small letters where there is one for each, else after a sign."""
    text = text.replace("−", "-")
    if text in {"∘", "°"} and sign == "^":
        return "°"
    if text and all(letter in letters for letter in text):
        return "".join(letters[letter] for letter in text)
    return sign + (text if len(text) == 1 else f"({text})") if text else ""


def _grouped(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[\w.]*[⁰-₟²³¹]*|\(.*\)", text) else f"({text})"
