"""Reads `config.json` key by key, so that nothing that changes the arithmetic can be overlooked.

Knows types and what is harmless, not what any key means: that is the families' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError

__all__ = ["HARMLESS", "LARGEST", "HfConfig", "all_of", "listed", "shown"]

# Keys that never change what a forward pass computes in any family above.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "attention_probs_dropout_prob",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "embedding_dropout",
        "encoder_no_repeat_ngram_size",
        "eod_token_id",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "model_type",
        "neftune_noise_alpha",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attn",
    }
)

# Keys that every configuration may have, and the only value that the families above can follow.
_NEUTRAL: Mapping[str, Any] = {"add_cross_attention": False, "is_encoder_decoder": False, "pruned_heads": {}}

# The largest whole number that any key may have.
LARGEST = 1 << 31
_SHOWN = 5
_LONGEST_SHOWN = 120


class HfConfig:
    """A configuration read key by key; `close` refuses whatever nobody read.

    where: the file, and the key inside it for nested values, as errors name it.
    architecture: the family that reads it.
    notices: sentences for the reader, gathered on the way.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._spellings: dict[str, str] = {}
        self.values = values
        self.where = where
        self.architecture = ""
        self.notices: list[str] = []
        self._read: set[str] = set()

    def spell(self, **theirs: str) -> None:
        """Read a key under the name that this family gives it; errors name it so, too."""
        self._spellings |= theirs

    def spelt(self, key: str) -> str:
        """The family's name of a key."""
        return self._spellings.get(key, key)

    def __contains__(self, key: str) -> bool:
        """Whether a key says anything."""
        return self.values.get(self.spelt(key)) is not None

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` on; null or absent gives `default`, or is an error when there is none."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            if default is None:
                raise ModelFolderError(f"{self.where} does not say {key}")
            return default
        return self._whole(key, value, least)

    def size_or_none(self, key: str, absent: int | None) -> int | None:
        """A whole number above 0 or null; `absent` when the key is not there."""
        key = self.spelt(key)
        if key not in self.values:
            return absent
        value = self._take(key)
        return None if value is None else self._whole(key, value, 1)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; null or absent gives `default`, or is an error when there is none."""
        key = self.spelt(key)
        value = self.number_or_none(key)
        if value is None:
            if default is None:
                raise ModelFolderError(f"{self.where} does not say {key}")
            return default
        return value

    def number_or_none(self, key: str) -> float | None:
        """A finite number above 0, or None when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or `default` when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a text")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a list of texts")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of finite numbers above 0, or None when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(entry, int | float) and not isinstance(entry, bool) and 0 < entry < math.inf for entry in value
        ):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a list of numbers above 0")
        return tuple(float(entry) for entry in value)

    def whole_numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers from 0 on, or None when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a list of whole numbers")
        return tuple(self._whole(key, entry, 0) for entry in value)

    def switches(self, key: str) -> tuple[bool, ...] | None:
        """A list of 0 and 1, or of true and false, or None when null or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, int) and entry in {0, 1} for entry in value):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a list of 0 and 1")
        return tuple(map(bool, value))

    def nested(self, key: str) -> HfConfig | None:
        """An object to read key by key, or None when null, empty or absent."""
        key = self.spelt(key)
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not an object")
        return HfConfig(value, f"{key} in {self.where}") if value else None

    def ignore(self, key: str) -> None:
        """A key that says nothing about the arithmetic of this family."""
        self._read.add(self.spelt(key))

    def must(self, key: str, allowed: Any) -> None:
        """Refuse any value but `allowed`, null and absence."""
        key = self.spelt(key)
        value = self._take(key)
        if value is not None and (value != allowed or isinstance(value, bool) is not isinstance(allowed, bool)):
            raise UnsupportedModelError(f"{key} = {shown(value)} ({self.where}) is not supported; {shown(allowed)} is")

    def close(self, reader: str, harmless: Iterable[str] = ()) -> None:
        """Refuse what was not read. A null says nothing and passes.

        Raises:
            UnsupportedModelError: `config.json sets attn_logit_softcapping, ...`
        """
        for key, allowed in _NEUTRAL.items():
            self.must(key, allowed)
        known = self._read.union(harmless)
        unread = sorted(key for key, value in self.values.items() if key not in known and value is not None)
        if unread:
            raise UnsupportedModelError(f"{self.where} sets {listed(unread)}, which {reader} does not read here")

    def _take(self, key: str) -> Any:
        self._read.add(key)
        return self.values.get(key)

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise ModelFolderError(f"{key} = {shown(value)} ({self.where}) is not a whole number from {least} on")
        return value


def shown(value: Any) -> str:
    """A value as JSON, cut: a hostile one may be megabytes long."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = [name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..." for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        return f"{', '.join(shown)} and {len(names) - _SHOWN} more"
    return all_of(shown)


def all_of(names: Sequence[str]) -> str:
    """All names, the last after an `and`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
