"""Folders that a quantiser has been through: the weights are those its own program would compute, to the bit.

The packing below is written from each scheme's description, one number at a time, to share nothing with the reader.
"""

import json

import ml_dtypes
import numpy as np
import pytest

from engine.convert.convert import convert, quantised_in_memory
from engine.convert.quantised import plain_tensors
from engine.convert.report import inspect
from engine.convert.safetensors import read_header
from engine.convert.source import open_source
from engine.core.quant import FORMATS
from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.store import open_nook
from engine.progress import finish
from engine.settings import Conversion
from tests.factory import cfg, make, st_bytes, weights

CONFIG = cfg(hidden_size=128, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2)
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # which column the nibbles of a word hold, lowest first


def linears():
    return [name for name, tensor in weights(CONFIG).items() if tensor.ndim == 2 and "layers" in name]


def words(values, bits):
    """Rows of small numbers as rows of 32-bit words, lowest bit first."""
    rows = []
    for row in values:
        number = sum(int(value) << (bits * place) for place, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([number >> (32 * place) & 0xFFFFFFFF for place in range(count)])
    return np.array(rows, np.uint32)


def raw(kind, array):
    return kind, array.shape, np.ascontiguousarray(array).tobytes()


def quantised(store, settings, **changes):
    """(arguments of `make`, the matrices that the quantised folder stands for)."""
    tensors, expected = dict(weights(CONFIG)), {}
    random = np.random.default_rng(5)
    for name in linears():
        rows, columns = tensors.pop(name).shape
        parts, expected[name] = store(name.removesuffix(".weight"), rows, columns, random)
        tensors |= parts
    key = {} if settings is None else {"quantization_config": settings}
    return {"config": CONFIG | key | changes, "tensors": tensors}, expected


def spread(grid, columns, group):
    return np.repeat(grid, group, axis=1)[:, :columns]


def gptq(bits=4, group=32, *, order=None, version=1, zeros=True):
    def store(stem, rows, columns, random):
        groups = -(-columns // group)
        codes = random.integers(0, 1 << bits, (rows, columns))
        zero = random.integers(0, 1 << bits, (rows, groups)) if zeros else np.full((rows, groups), 1 << (bits - 1))
        scales = random.uniform(0.001, 0.01, (rows, groups)).astype(np.float16)
        index = np.arange(columns) // group
        if order:
            random.shuffle(index)
        stored = zero if version == 2 else (zero - 1) % (1 << bits)
        parts = {
            f"{stem}.qweight": raw("I32", np.ascontiguousarray(words(codes, bits).T)),
            f"{stem}.scales": raw("F16", scales.T),
            f"{stem}.g_idx": raw("I32", index.astype(np.int32)),
        }
        if zeros:
            parts[f"{stem}.qzeros"] = raw("I32", words(stored.T, bits))
        weight = (codes - zero[:, index]).astype(np.float32) * scales[:, index].astype(np.float32)
        return parts, weight

    return store


def awq(group=32):
    def store(stem, rows, columns, random):
        groups = columns // group
        codes = random.integers(0, 16, (rows, columns))
        zero = random.integers(0, 16, (rows, groups))
        scales = random.uniform(0.001, 0.01, (rows, groups)).astype(np.float16)

        def packed(matrix):  # (columns, rows): eight rows to a word, in AWQ's order
            shuffled = matrix.reshape(len(matrix), -1, 8)[:, :, AWQ_PLACES].reshape(len(matrix), -1)
            return raw("I32", words(shuffled, 4))

        parts = {
            f"{stem}.qweight": packed(codes.T),
            f"{stem}.qzeros": packed(zero.T),
            f"{stem}.scales": raw("F16", scales.T),
        }
        weight = (codes - spread(zero, columns, group)).astype(np.float32) * spread(scales, columns, group)
        return parts, weight.astype(np.float32)

    return store


def compressed(bits=4, group=32, *, zeros=False):
    def store(stem, rows, columns, random):
        groups = columns // group
        half = 1 << (bits - 1)
        values = random.integers(-half, half, (rows, columns))
        zero = random.integers(-half, half, (rows, groups)) if zeros else np.zeros((rows, groups), int)
        scales = random.uniform(0.001, 0.01, (rows, groups)).astype(ml_dtypes.bfloat16)
        parts = {
            f"{stem}.weight_packed": raw("I32", words(values + half, bits)),
            f"{stem}.weight_scale": raw("BF16", scales.view(np.uint16)),
            f"{stem}.weight_shape": raw("I64", np.array([rows, columns])),
            f"{stem}.input_scale": raw("F32", np.ones(1, np.float32)),
        }
        if zeros:
            parts[f"{stem}.weight_zero_point"] = raw("I32", np.ascontiguousarray(words((zero + half).T, bits).T))
        return parts, (values - spread(zero, columns, group)).astype(np.float32) * spread(
            scales.astype(np.float32), columns, group
        )

    return store


def int8(stem, rows, columns, random):
    values = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = random.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
    return {f"{stem}.weight": raw("I8", values), f"{stem}.weight_scale": raw("F32", scales)}, values * scales


def bitsandbytes_int8(stem, rows, columns, random):
    values = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = random.uniform(0.1, 1, rows).astype(np.float32)
    parts = {f"{stem}.weight": raw("I8", values), f"{stem}.SCB": raw("F32", largest)}
    return parts, values * (largest / np.float32(127))[:, None]


def fp8(kind, dtype, scale_shape, suffix="weight_scale"):
    def store(stem, rows, columns, random):
        values = random.normal(0, 1, (rows, columns)).astype(dtype)
        shape = scale_shape(rows, columns)
        scales = random.uniform(0.01, 0.1, shape).astype(np.float32)
        grid = scales.reshape(shape if len(shape) == 2 else (-1, 1))
        tall, wide = -(-rows // grid.shape[0]), -(-columns // grid.shape[1])
        tall, wide = (64, 64) if suffix == "weight_scale_inv" else (tall, wide)
        grid = np.repeat(np.repeat(grid, tall, 0), wide, 1)[:rows, :columns]
        parts = {f"{stem}.weight": raw(kind, values.view(np.uint8)), f"{stem}.{suffix}": raw("F32", scales)}
        return parts, values.astype(np.float32) * grid

    return store


def nf4(*, nested):
    table = np.sort(np.random.default_rng(1).normal(0, 0.5, 16)).astype(np.float32)

    def store(stem, rows, columns, random):
        count, size = rows * columns, 64
        codes = random.integers(0, 16, count)
        blocks = -(-count // size)
        state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [rows, columns]}
        name = f"{stem}.weight"
        pairs = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)
        parts = {name: raw("U8", pairs.reshape(-1, 1)), f"{name}.quant_map": raw("F32", table)}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            inner = random.integers(0, 256, blocks).astype(np.uint8)
            map_ = np.linspace(-1, 1, 256).astype(np.float32)
            outer = random.uniform(0.1, 0.2, -(-blocks // 256)).astype(np.float32)
            scales = map_[inner] * np.repeat(outer, 256)[:blocks] + np.float32(0.25)
            parts |= {
                f"{name}.absmax": raw("U8", inner),
                f"{name}.nested_absmax": raw("F32", outer),
                f"{name}.nested_quant_map": raw("F32", map_),
            }
        else:
            scales = random.uniform(0.01, 0.1, blocks).astype(np.float32)
            parts[f"{name}.absmax"] = raw("F32", scales)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts[f"{name}.quant_state.bitsandbytes__nf4"] = raw("U8", text)
        return parts, (table[codes] * np.repeat(scales, size)[:count]).reshape(rows, columns)

    return store


def mlx(bits=4, group=32):
    def store(stem, rows, columns, random):
        codes = random.integers(0, 1 << bits, (rows, columns))
        scales, biases = random.uniform(0.001, 0.01, (2, rows, columns // group)).astype(np.float16)
        parts = {
            f"{stem}.weight": raw("U32", words(codes, bits)),
            f"{stem}.scales": raw("F16", scales),
            f"{stem}.biases": raw("F16", biases),
        }
        grids = [spread(grid.astype(np.float32), columns, group) for grid in (scales, biases)]
        return parts, codes.astype(np.float32) * grids[0] + grids[1]

    return store


def float4(*, nv):
    def store(stem, rows, columns, random):
        group = 16 if nv else 32
        codes = random.integers(0, 16, (rows, columns))
        values = np.array(FP4, np.float32)[codes]
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        parts = {f"{stem}.weight_packed": raw("U8", pairs)}
        if nv:
            scales = random.uniform(1, 100, (rows, columns // group)).astype(ml_dtypes.float8_e4m3fn)
            whole = np.array([300.0], np.float32)
            parts |= {
                f"{stem}.weight_scale": raw("F8_E4M3", scales.view(np.uint8)),
                f"{stem}.weight_global_scale": raw("F32", whole),
                f"{stem}.input_global_scale": raw("F32", whole),
            }
            grid = scales.astype(np.float32) / whole
        else:
            exponents = random.integers(110, 125, (rows, columns // group)).astype(np.uint8)
            parts[f"{stem}.weight_scale"] = raw("U8", exponents)
            grid = np.exp2(exponents.astype(np.float32) - 127)
        return parts, values * spread(grid, columns, group)

    return store


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}, {"quant_method": "awq", "bits": 4, "group_size": 32}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64]}
CASES = {
    "gptq": (gptq(), GPTQ),
    "gptq, one scale per row": (gptq(group=1 << 20), {"quant_method": "gptq", "bits": 4, "group_size": -1}),
    "gptq in the order of importance": (gptq(order=True), GPTQ | {"desc_act": True}),
    "gptq, second version": (gptq(version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq without zero points": (gptq(zeros=False), GPTQ | {"sym": True}),
    "gptq, 2 bits": (gptq(2), GPTQ | {"bits": 2}),
    "gptq, 3 bits": (gptq(3), GPTQ | {"bits": 3}),
    "gptq, 8 bits": (gptq(8), GPTQ | {"bits": 8}),
    "gptq unsaid": (gptq(), None),
    "awq": (awq(), AWQ),
    "awq unsaid": (awq(16), None),
    "packed integers": (compressed(), COMPRESSED),
    "packed integers with zero points": (compressed(zeros=True), COMPRESSED),
    "packed integers, 8 bits": (compressed(8), COMPRESSED),
    "packed integers, 3 bits": (compressed(3), COMPRESSED),
    "int8": (int8, COMPRESSED | {"format": "int-quantized"}),
    "bitsandbytes int8": (bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4(nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4, scales quantised too": (nf4(nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp8 in blocks": (fp8("F8_E4M3", E4M3, lambda r, c: (-(-r // 64), -(-c // 64)), "weight_scale_inv"), BLOCKS),
    "fp8, one scale": (fp8("F8_E4M3", E4M3, lambda _r, _c: ()), {"quant_method": "fp8"}),
    "fp8 by rows": (fp8("F8_E4M3", E4M3, lambda r, _: (r, 1)), {"quant_method": "fbgemm_fp8"}),
    "fp8 of the other kind": (fp8("F8_E5M2", E5M2, lambda r, _: (r,)), COMPRESSED | {"format": "float-quantized"}),
    "nvfp4": (float4(nv=True), COMPRESSED | {"format": "nvfp4-pack-quantized"}),
    "mlx": (mlx(), {"quant_method": "mlx", "bits": 4, "group_size": 32}),
    "mlx, 6 bits": (mlx(6), {"quant_method": "mlx", "bits": 6, "group_size": 32}),
    "mxfp4": (float4(nv=False), COMPRESSED | {"format": "mxfp4-pack-quantized"}),
}
EXACT_IN_INT4 = {name for name in CASES if "gptq" in name} - {"gptq in the order of importance", "gptq, 8 bits"}
EXACT_IN_INT4 |= {"awq", "packed integers", "packed integers with zero points", "packed integers, 3 bits"}
EXACT_IN_INT8 = EXACT_IN_INT4 | {"int8", "bitsandbytes int8"}


def names_of(source):
    return {name: assignment for assignment in source.assignments for name in assignment.sources}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_the_quantiser_means(case, tmp_path):
    arguments, expected = quantised(*CASES[case])
    source = open_source(make(tmp_path / "q", **arguments))
    for name, weight in expected.items():
        rows = weight.shape[0]
        np.testing.assert_array_equal(source.reader.rows(name, 0, rows), weight, err_msg=name)
        for first, count in ((0, 1), (17, 30), (rows - 5, 5)):  # slices begin and end inside words
            part = source.reader.rows(name, first, count)
            np.testing.assert_array_equal(part, weight[first : first + count], err_msg=name)


@pytest.mark.parametrize(("bits", "cases"), [(4, sorted(EXACT_IN_INT4)), (8, sorted(EXACT_IN_INT8))])
def test_whole_numbers_are_not_rounded_a_second_time(bits, cases, tmp_path):
    for number, case in enumerate(cases):
        arguments, expected = quantised(*CASES[case])
        source = open_source(make(tmp_path / str(number), **arguments))
        assignments = names_of(source)
        model = finish(quantised_in_memory(source, Conversion(bits=bits, group_size=32)))
        for name, weight in expected.items():
            ours = assignments[name].tensor
            tensor = model.weights.tensor(ours.name)
            whole = FORMATS[tensor.format].unpack(tensor.data, tensor.exponent, ours.rows, ours.cols, tensor.group)
            first = sum(ours.parts[: assignments[name].sources.index(name)])
            # Scales that float16 cannot hold are the only thing that is rounded.
            rounded = 2**-11 if "int8" in case else 0
            np.testing.assert_allclose(
                whole[first : first + len(weight)], weight, rtol=rounded, atol=0, err_msg=f"{case}: {name}"
            )


def test_an_order_of_importance_is_said_aloud(tmp_path):
    for name, said in (("gptq", False), ("gptq in the order of importance", True)):
        arguments, _ = quantised(*CASES[name])
        report = inspect(make(tmp_path / name, **arguments))
        assert report.usable
        assert any("order of importance (g_idx)" in problem.sentence for problem in report.problems) is said


def test_a_smaller_group_of_the_source_is_kept(tmp_path):
    arguments, expected = quantised(gptq(group=32), GPTQ)
    model = finish(quantised_in_memory(open_source(make(tmp_path / "q", **arguments)), Conversion(group_size=128)))
    assert model.weights.tensor("layers.0.feed_forward.down").group == 32
    assert model.weights.tensor("embedding").group == 128
    assert expected


def test_a_code_that_int8_has_not_is_rounded_with_the_rest(tmp_path):
    def lowest(stem, rows, columns, random):
        parts, _ = int8(stem, rows, columns, random)
        name = f"{stem}.weight"
        values = np.frombuffer(parts[name][2], np.int8).reshape(rows, columns).copy()
        values[3, 4] = -128
        scale = np.frombuffer(parts[f"{stem}.weight_scale"][2], np.float32).reshape(rows, 1)
        return parts | {name: raw("I8", values)}, values * scale

    arguments, expected = quantised(lowest, COMPRESSED)
    source = open_source(make(tmp_path / "q", **arguments))
    model = finish(quantised_in_memory(source, Conversion(bits=8)))
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = model.weights.tensor("layers.0.feed_forward.down")
    whole = FORMATS["q8"].unpack(tensor.data, tensor.exponent, tensor.rows, tensor.cols, tensor.group)
    step = np.abs(expected[name]).max(axis=1, keepdims=True) / 127
    assert (np.abs(whole - expected[name]) <= 0.51 * step).all()
    assert whole[3, 4] == pytest.approx(expected[name][3, 4], rel=1e-3)


def test_a_quantised_folder_becomes_a_file(tmp_path):
    arguments, expected = quantised(awq(), AWQ)
    folder = make(tmp_path / "q", **arguments)
    assert inspect(folder).source_dtype == "AWQ int4"
    assert inspect(folder).usable
    finish(convert(folder, tmp_path / "q.nook", Conversion()))
    tensor = open_nook(tmp_path / "q.nook").weights.tensor("layers.1.feed_forward.down")
    whole = FORMATS[tensor.format].unpack(tensor.data, tensor.exponent, tensor.rows, tensor.cols, tensor.group)
    assert tensor.format == "q4g"
    np.testing.assert_array_equal(whole, expected["model.layers.1.mlp.down_proj.weight"])


def test_plain_float8_is_read_as_it_is(tmp_path):
    tensors = {name: tensor.astype(E5M2) for name, tensor in weights(CONFIG).items()}
    stored = {name: raw("F8_E5M2", tensor.view(np.uint8)) for name, tensor in tensors.items()}
    source = open_source(make(tmp_path / "q", CONFIG, stored))
    name = linears()[0]
    np.testing.assert_array_equal(source.reader.rows(name, 0, 64), tensors[name][:64].astype(np.float32))


STEM = linears()[0].removesuffix(".weight")
BROKEN = {
    "no scales": (CASES["gptq"], f"{STEM}.scales", None, "scales is missing"),
    "scales of other rows": (CASES["gptq"], f"{STEM}.scales", raw("F16", np.ones((4, 8), np.float16)), "contradicts"),
    "zeros of other rows": (CASES["gptq"], f"{STEM}.qzeros", raw("I32", np.ones((4, 1), np.int32)), "contradicts"),
    "a group beyond": (CASES["gptq"], f"{STEM}.g_idx", raw("I32", np.full(128, 4, np.int32)), "not there"),
    "short g_idx": (CASES["gptq"], f"{STEM}.g_idx", raw("I32", np.zeros(12, np.int32)), "one entry for each column"),
    "another shape": (CASES["packed integers"], f"{STEM}.weight_shape", raw("I64", np.array([1, 128])), "contradicts"),
    "a huge shape": (
        CASES["packed integers"],
        f"{STEM}.weight_shape",
        raw("I64", np.array([128, 1 << 60])),
        "contradicts",
    ),
    "no grid": (CASES["fp8 in blocks"], f"{STEM}.weight_scale_inv", raw("F32", np.ones((5, 5), np.float32)), "contra"),
    "no state": (
        CASES["nf4"],
        f"{STEM}.weight.quant_state.bitsandbytes__nf4",
        raw("U8", np.frombuffer(b"[1]", np.uint8)),
        "contradicts",
    ),
    "fewer block scales": (CASES["nf4"], f"{STEM}.weight.absmax", raw("F32", np.ones(3, np.float32)), "contradicts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_contradict_each_other_are_named(case, tmp_path):
    good, name, value, words_ = BROKEN[case]
    arguments, _ = quantised(*good)
    arguments["tensors"].pop(name)
    if value is not None:
        arguments["tensors"][name] = value
    folder = make(tmp_path / "q", **arguments)
    with pytest.raises(ModelFolderError, match=words_) as caught:
        open_source(folder)
    assert "self_attn" in str(caught.value) or "safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "unnamed"),
        ("quip", "quip"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (COMPRESSED | {"transform_config": {"config_groups": {}}}, "transform_config"),
    ],
)
def test_schemes_that_are_not_read_are_named(settings, named, tmp_path):
    folder = make(tmp_path / "q", CONFIG | {"quantization_config": settings})
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        open_source(folder)
    assert "BF16 or FP16 folder" in str(caught.value)


def test_experts_in_blocks_of_four_bit_floats(tmp_path):
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (3, 4, 64))  # experts, rows, columns
    exponents = random.integers(120, 130, (3, 4, 2)).astype(np.uint8)
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(3, 4, 2, 16)
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    path.write_bytes(st_bytes({name: raw("U8", pairs), name.replace("_blocks", "_scales"): raw("U8", exponents)}))
    (only,) = plain_tensors(read_header(path), {"quant_method": "mxfp4"}).items()
    assert (only[0], only[1].shape) == (name, (3, 4, 64))
    weight = np.array(FP4, np.float32)[codes] * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=2)
    np.testing.assert_array_equal(only[1].rows(0, 12), weight.reshape(12, 64))
    np.testing.assert_array_equal(only[1].rows(5, 3), weight.reshape(12, 64)[5:8])
