"""Makes the reference values ("goldens") that the parity tests compare with, using torch and transformers.

    python -m tests.goldens.make_goldens tiny OUT_DIR [--case NAME ...]
        For every case of tiny_folder.py: write the folder to a temporary place, check that transformers loads
        it with no missing or unexpected tensor, and store OUT_DIR/tiny-CASE.npz.
    python -m tests.goldens.make_goldens real FOLDER NAME OUT_DIR --text FILE
        The same for the first 300 tokens of a text in a real model's folder: OUT_DIR/real-NAME.npz.
    python -m tests.goldens.make_goldens continue FOLDER NAME OUT_DIR
        Greedy continuations of three chat prompts: OUT_DIR/continue-NAME.json.
    python -m tests.goldens.make_goldens tokenizer FOLDER NAME OUT_DIR
        Ids of awkward texts and rendered chat prompts: OUT_DIR/tokenizer-NAME.json.
    python -m tests.goldens.make_goldens perplexity FOLDER NAME OUT_DIR --text FILE --label en [--chunks 16]
        Negative log-likelihood of a text, chunk by chunk: OUT_DIR/ppl-NAME-LABEL.json.

The reference is one forward pass over all ids at once, float32 weights (bf16 files are widened, which is
exact) and eager attention.

Arrays of a .npz (n = 300 positions):

    ids         int32   (n,)      the input
    argmax      int32   (n,)      most likely next id after each position
    margin      float32 (n,)      best logit less the second best: where it is tiny, argmax may differ
    max         float32 (n,)      best logit
    logsumexp   float32 (n,)      so -(logit - logsumexp) is the negative log-likelihood of an id
    next_logit  float32 (n - 1,)  logit at position i of the id at i + 1 (perplexity of the ids themselves)
    columns     int32   (64,)     fixed vocabulary columns
    logits      float32 (n, 64)   logits of those columns
    last_logits float32 (vocab,)  all logits of the last position (tiny models only)
    meta        str               JSON: versions, shapes, sha256 of the weights, and "sdpa_max_abs_diff": how far
                                  transformers' other attention is from eager, in the stored columns (a measure
                                  of float32's own noise)

Perplexity is by llama-perplexity's method: the text is tokenised whole (no special tokens added) and cut into
chunks of 512 tokens, each run alone from an empty cache; the tokens at positions 257 .. 511 of every chunk are
scored. A rest shorter than a chunk is dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.goldens import tiny_folder

Values = dict[str, Any]
Ids = NDArray[np.int32]
Float32 = NDArray[np.float32]

POSITIONS, COLUMNS, NEW_TOKENS, CHUNK = 300, 64, 64, 512

CHAT_PROMPTS = {
    "english": [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    "chinese": [{"role": "user", "content": "请用两句话介绍一下北京。"}],
    "code": [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
}

CONVERSATIONS = {
    "user": [{"role": "user", "content": "What is 12 * 12?"}],
    "system_user": [
        {"role": "system", "content": "You answer in one word. 你只说中文。"},
        {"role": "user", "content": "Which colour is the sea?"},
    ],
    "multi_turn": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Name a prime number."},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Another one?\n不要重复 😀"},
    ],
}

TOKENIZER_TEXTS = {
    "empty": "",
    "english": "Hello, world! It's 9 o'clock; they'd've said so. I'LL go.",
    "chinese": "你好，世界！今天的天气怎么样？我们去公园散步吧。“引号”、《书名》…",
    "mixed": "GPT模型在2026年的accuracy达到98.6%，比去年高1.5℃。",
    "emoji": "😀👩‍🚀🇨🇳👍🏽 ok ☕️",
    "digits": "0 12 345 6789 1234567890 3.14159 1,000,000 ½ ⅷ ٣",
    "code": "def f(x):\n    if x == 0:\n\treturn [i ** 2 for i in range(10)]\n\n\n    # done\r\n",
    "spaces": "  two  leading\t\ttabs   trailing   ",
    "newlines": "a\n\nb\r\n\r\nc\n \n  d\n",
    "accents": "naïve café — e\u0301 a\u030a \u212b ﬁ Ελληνικά русский עברית हिन्दी",
    "rare_bytes": "\u0000\u0001\u200b\ufeff\U0001d4d0\U00020000",
    "controls": "<|im_start|>system\nignore<|im_end|>\n<|endoftext|> <tool_call>{}</tool_call> <|im_start <s></s>",
}


def say(line: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """What the goldens were made with."""
    import tokenizers
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def load_model(folder: Path) -> Any:
    """The model in float32 with eager attention; ends the program if a tensor is missing, unexpected or misshapen."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    bad = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if bad:
        sys.exit(f"{folder}: transformers did not load every tensor: {bad}")
    return model.eval()


def all_logits(model: Any, ids: NDArray[Any]) -> Float32:
    """float32 (len(ids), vocab) of one forward pass."""
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def reduced(ids: Ids, logits: Float32, *, keep_last: bool) -> dict[str, NDArray[Any]]:
    """What is stored of the logits; see the module's docstring."""
    vocab = logits.shape[1]
    columns = ((np.arange(COLUMNS) + 0.5) * vocab / COLUMNS).astype(np.int32)
    best2 = np.partition(logits, -2, axis=1)[:, -2:]
    high = best2[:, 1].astype(np.float64)
    total = np.exp(logits.astype(np.float64) - high[:, None]).sum(axis=1)
    out = {
        "ids": ids.astype(np.int32),
        "argmax": logits.argmax(axis=1).astype(np.int32),
        "margin": best2[:, 1] - best2[:, 0],
        "max": best2[:, 1],
        "logsumexp": (high + np.log(total)).astype(np.float32),
        "next_logit": logits[np.arange(len(ids) - 1), ids[1:]],
        "columns": columns,
        "logits": logits[:, columns],
    }
    return out | {"last_logits": logits[-1]} if keep_last else out


def sdpa_difference(model: Any, ids: Ids, columns: Ids, eager: Float32) -> float:
    """How far transformers' other attention is from this one."""
    model.set_attn_implementation("sdpa")
    difference = float(np.abs(all_logits(model, ids)[:, columns] - eager).max())
    model.set_attn_implementation("eager")
    return difference


def save_npz(path: Path, arrays: dict[str, NDArray[Any]], meta: Values) -> None:
    """Store arrays and meta."""
    text = json.dumps(meta | {"versions": versions()}, ensure_ascii=False, sort_keys=True)
    np.savez_compressed(path, allow_pickle=False, **arrays, meta=text)
    say(
        f"{path}: {path.stat().st_size / 1000:.0f} KB, smallest margin {arrays['margin'].min():.1e}, "
        f"sdpa differs by {meta['sdpa_max_abs_diff']:.1e}"
    )


def save_json(path: Path, values: Values) -> None:
    """Store JSON that a person can read."""
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    say(f"{path}: {path.stat().st_size / 1000:.0f} KB")


def make_tiny(given: argparse.Namespace) -> None:
    """The tiny models."""
    ids = tiny_folder.token_ids(POSITIONS)
    for case in given.case or tiny_folder.CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "a"
            digest = tiny_folder.write_folder(folder, case)
            model = load_model(folder)
            logits = all_logits(model, ids)
            arrays = reduced(ids, logits, keep_last=True)
            difference = sdpa_difference(model, ids, arrays["columns"], arrays["logits"])
            # The other ways to write the same model must give the same numbers.
            for dtype, shards, style in (("bf16", 3, 5), ("f16", 1, 4)):
                other = Path(temporary) / dtype
                tiny_folder.write_folder(other, case, dtype, shards=shards, style=style)
                if not np.array_equal(all_logits(load_model(other), ids), logits):
                    sys.exit(f"{case}: the {dtype} folder gives other logits")
            meta = {
                "case": case,
                "config": tiny_folder.make_config(case),
                "vocab": logits.shape[1],
                "seed": 0,
                "sha256_f32": digest,
                "logits_std": float(logits.std()),
                "sdpa_max_abs_diff": difference,
            }
            save_npz(given.out / f"tiny-{case}.npz", arrays, meta)


def file_sha256(path: Path) -> str:
    """The hash of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_meta(given: argparse.Namespace) -> Values:
    """Which model it was, to the bit."""
    files = sorted(f for f in given.folder.iterdir() if f.name.endswith((".safetensors", "tokenizer.json")))
    return {"name": given.name, "files": {file.name: file_sha256(file) for file in files}}


def load_tokenizer(folder: Path) -> Any:
    """tokenizer.json itself: transformers' classes rebuild some pre-tokenizers and then differ from the file."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def render_chat(folder: Path, messages: list[dict[str, str]]) -> str:
    """The conversation by the folder's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def make_real(given: argparse.Namespace) -> None:
    """Logits of a real model."""
    text = given.text.read_text(encoding="utf-8")
    ids = load_tokenizer(given.folder).encode(text, add_special_tokens=False).ids[:POSITIONS]
    ids = np.array(ids, np.int32)
    if len(ids) < POSITIONS:
        sys.exit(f"{given.text}: only {len(ids)} tokens")
    model = load_model(given.folder)
    logits = all_logits(model, ids)
    arrays = reduced(ids, logits, keep_last=False)
    losses = (arrays["logsumexp"][:-1] - arrays["next_logit"]).astype(np.float64)
    meta = folder_meta(given) | {
        "text": given.text.name,
        "text_sha256": file_sha256(given.text),
        "vocab": logits.shape[1],
        "logits_std": float(logits.std()),
        "perplexity": float(np.exp(losses.mean())),
        "sdpa_max_abs_diff": sdpa_difference(model, ids, arrays["columns"], arrays["logits"]),
    }
    save_npz(given.out / f"real-{given.name}.npz", arrays, meta)


def greedy(model: Any, prompt_ids: list[int], ends: list[int], count: int) -> tuple[list[int], list[float]]:
    """Pure greedy decoding with a key/value cache (no repetition penalty): ids, the end included, and margins."""
    import torch

    out: list[int] = []
    margins: list[float] = []
    cache, x = None, torch.tensor([prompt_ids])
    with torch.inference_mode():
        while len(out) < count:
            result = model(input_ids=x, past_key_values=cache, use_cache=True)
            cache, best = result.past_key_values, result.logits[0, -1].topk(2)
            out.append(int(best.indices[0]))
            margins.append(round(float(best.values[0] - best.values[1]), 4))
            if out[-1] in ends:
                break
            x = best.indices[:1][None]
    return out, margins


def make_continue(given: argparse.Namespace) -> None:
    """Greedy answers of a real model; without a chat template, what follows the last message as a plain text."""
    settings = json.loads((given.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    chats = "chat_template" in settings or (given.folder / "chat_template.jinja").exists()
    tokenizer, model = load_tokenizer(given.folder), load_model(given.folder)
    ends = json.loads((given.folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    continuations = {}
    for key, messages in CHAT_PROMPTS.items():
        prompt = render_chat(given.folder, messages) if chats else messages[-1]["content"]
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=not chats).ids
        ids, margins = greedy(model, prompt_ids, ends, NEW_TOKENS)
        continuations[key] = {
            "messages": messages,
            "prompt": prompt,
            "prompt_ids": prompt_ids,
            "ids": ids,
            "margins": margins,
            "stopped": ids[-1] in ends,
            "text": tokenizer.decode(ids, skip_special_tokens=True),
        }
        say(f"{given.name} {key}: {continuations[key]['text']!r}")
    about = {"versions": versions(), "dtype": "float32", "attention": "eager", "eos": ends, "new_tokens": NEW_TOKENS}
    meta = folder_meta(given) | about
    save_json(given.out / f"continue-{given.name}.json", {"meta": meta, "continuations": continuations})


def make_tokenizer(given: argparse.Namespace) -> None:
    """Ids and prompts of a real model's tokenizer and template."""
    tokenizer, plain = load_tokenizer(given.folder), load_tokenizer(given.folder)
    plain.encode_special_tokens = True

    def both(text: str) -> Values:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return {
            "text": text,
            "ids": ids,
            "ids_specials_as_text": plain.encode(text, add_special_tokens=False).ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),
        }

    chats = {}
    for key, messages in CONVERSATIONS.items():
        prompt = render_chat(given.folder, messages)
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        chats[key] = {"messages": messages, "prompt": prompt, "ids": ids}
    meta = {
        "name": given.name,
        "tokenizer_sha256": file_sha256(given.folder / "tokenizer.json"),
        "versions": versions(),
        "note": "ids: tokenizer.json through the tokenizers library, no special tokens added; "
        "ids_specials_as_text: with encode_special_tokens, special tokens split like any text",
    }
    texts = {key: both(text) for key, text in TOKENIZER_TEXTS.items()}
    save_json(given.out / f"tokenizer-{given.name}.json", {"meta": meta, "texts": texts, "chats": chats})


def make_perplexity(given: argparse.Namespace) -> None:
    """Summed negative log-likelihood of the scored half of every chunk."""
    text = given.text.read_text(encoding="utf-8")
    ids = np.array(load_tokenizer(given.folder).encode(text, add_special_tokens=False).ids)
    model, sums, middle = load_model(given.folder), [], CHUNK // 2
    for start in range(0, min(given.chunks, len(ids) // CHUNK) * CHUNK, CHUNK):
        chunk = ids[start : start + CHUNK]
        logits = all_logits(model, chunk)[middle:-1].astype(np.float64)
        high = logits.max(axis=1)
        total = high + np.log(np.exp(logits - high[:, None]).sum(axis=1))
        sums.append(float((total - logits[np.arange(len(logits)), chunk[middle + 1 :]]).sum()))
        say(f"{given.name} {given.label}: {len(sums)} chunks")
    scored = CHUNK - middle - 1
    values = {
        "name": given.name,
        "text": given.text.name,
        "text_sha256": file_sha256(given.text),
        "tokens": len(ids),
        "context": CHUNK,
        "scored_per_chunk": scored,
        "dtype": "float32",
        "attention": "eager",
        "versions": versions(),
        "nll": sums,
        "chunks": len(sums),
        "perplexity": math.exp(sum(sums) / (len(sums) * scored)),
    }
    save_json(given.out / f"ppl-{given.name}-{given.label}.json", values)


MAKERS = {
    "tiny": make_tiny,
    "real": make_real,
    "continue": make_continue,
    "tokenizer": make_tokenizer,
    "perplexity": make_perplexity,
}


def main() -> None:
    """The command line of the module's docstring."""
    parser = argparse.ArgumentParser(description="Make the reference values that the parity tests compare with.")
    parser.add_argument("--threads", type=int, default=2)
    kinds = parser.add_subparsers(dest="what", required=True)
    for what in MAKERS:
        kind = kinds.add_parser(what)
        if what == "tiny":
            kind.add_argument("--case", action="append", choices=list(tiny_folder.CASES))
        else:
            kind.add_argument("folder", type=Path)
            kind.add_argument("name")
        kind.add_argument("out", type=Path)
        if what in {"real", "perplexity"}:
            kind.add_argument("--text", type=Path, required=True)
        if what == "perplexity":
            kind.add_argument("--label", required=True)
            kind.add_argument("--chunks", type=int, default=16)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what != "tokenizer":
        import torch

        torch.set_num_threads(given.threads)
    MAKERS[given.what](given)


if __name__ == "__main__":
    main()
