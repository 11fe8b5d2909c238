"""Byte offsets of operation fields and of the step's state, as constants that numba folds into the code.

`at.MATMUL_OUT` is the offset of field `out` in a MATMUL row, `at.STATE_TOKENS` that of a
word of the state. The activation fields lie at the same place in every row that has them
(`at.X_GROUP`, ...), and so does `at.ROWS`.
"""

from engine.core.operations import FIELDS, PACK, STATE, Opcode

for _opcode, _names in FIELDS.items():
    for _index, _name in enumerate(_names):
        globals()[f"{_opcode.name}_{_name.upper()}"] = 8 * (1 + _index)
for _index, _name in enumerate(STATE):
    globals()[f"STATE_{_name.upper()}"] = 8 * _index

for _index, _name in enumerate(PACK):
    globals()[f"PACK_{_name.upper()}"] = 8 * _index

_SHARED = ("x_span", "x_group", "x_codes", "x_stride", "x_scales", "x_sums", "x_scale_stride", "x_columns", "rows")
for _index, _name in enumerate(_SHARED):
    globals()[_name.upper()] = 8 * (1 + _index)
    for _opcode in (Opcode.NORM, Opcode.QUANTISE, Opcode.ACTIVATE, Opcode.MATMUL, Opcode.EXPERTS):
        assert FIELDS[_opcode][_index] == _name, (_opcode, _name)
