"""The fixed texts of an exported folder: README, C header, JSON schema. Not covered: numbers of any kind."""

from __future__ import annotations

README = """# Golden fixtures for FP8 kernels

{cases} calls with inputs, expected outputs and admissible intervals. Nothing here needs Python or a JSON parser.

## Reading

`INDEX.txt` is tab-separated, one tensor a line:

    case  role  name  dtype  shape  offset  bytes

The tensor is `bytes` bytes at `offset` of `data/<case>.bin`, row-major and little-endian. `shape` is `5x256`, or `-`
for a single value. Lines that begin with `#` carry the id of a case and the options of its call. `fp8_golden.h` holds
the same as C. `manifest.json` says everything again, as `schema.json` describes it. `sha256sum -c SHA256SUMS` checks
all of it.

| role | what it is |
|---|---|
| input | an operand under its name; 8-bit floats are codes, scales multiply on dequantisation |
| expected | `out`, or `out.NAME` of a routine with several outputs: the exact result, rounded once to nearest even |
| low, high, free | `low.ARCH.OUTPUT` and so on: the admissible interval, in the dtype of the output |

ARCH is `bits` (the same on every machine), `cpu` (float32 sums in any order), `sm90`, `gfx942`: the arithmetic that the
interval holds for; `numerics` in the manifest names it. dtypes: `float8_e4m3fn`, `float8_e5m2`, `float8_e8m0fnu`,
`float8_e4m3fnuz` (one byte each), `bfloat16`, `float16`, `float32`, `float64`, `uint8`, `bool`, `int32`, `int64`.

## When an element is right

1. `free` is 1: it is not specified, or the derivation does not constrain it; anything is right.
2. The expected value is NaN: it must be NaN.
3. Otherwise `low <= element <= high`. -0 equals +0, except in an output of codes (one byte an element): a quantiser
   keeps the sign of what it rounds to zero, and there -0 lies below +0.

An output without an interval must equal the expected bits. The exceptions are marked `"judged": "contract"` in the
manifest: the experts of `moe_routing` may come in any order; any balanced partition of the work is right for
`get_paged_mqa_logits_metadata`; a code of `requantize_with_max_scale` may differ where float16 rounds twice; and a
product whose bfloat16 operand the kernel quantises itself depends on codes at the edge of a rounding.
An interval of codes (`q`) holds for the expected scale; a library may publish another admissible scale, and only the
judge below knows which codes belong to it. `strides` in the manifest says in which memory layout a routine returns its
output; files are row-major all the same.

## Answering

Write `<case>.out.bin` (`<case>.out.q.bin`, `<case>.out.scale.bin`) for each case you computed, the bytes of the output
in its dtype, row-major, little-endian; or one `<case>.safetensors` with the tensor `out` (`out.q`, `out.scale`). Then

    fp8-oracle fixtures judge THIS_FOLDER --outputs YOUR_FOLDER --arch sm90

says for every case whether it is admissible and, where it is not, which elements are wrong and what explains them.
"""

HEADER = """/* Layout of the golden fixtures in this folder; see README.md. C99, no dependencies. */
#ifndef FP8_GOLDEN_H
#define FP8_GOLDEN_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FP8_GOLDEN_VERSION 1
#define FP8_GOLDEN_ALIGNMENT 64

typedef struct {
    char case_name[128];   /* data/<case_name>.bin */
    char role[16];         /* input, expected, low, high, free */
    char name[96];         /* a, a_scale, ..., out, low.sm90.out */
    char dtype[24];        /* float8_e4m3fn, bfloat16, float32, ... */
    int rank;              /* 0: a single value */
    int64_t shape[8];      /* row-major */
    int64_t offset;        /* in bytes, a multiple of 64 */
    int64_t bytes;
} fp8_golden_tensor;

/* Size of one element of a dtype in bytes; 0 for an unknown one. */
static inline int fp8_golden_itemsize(const char *dtype) {
    if (!strncmp(dtype, "float8_", 7) || !strcmp(dtype, "uint8") || !strcmp(dtype, "bool")) return 1;
    if (!strcmp(dtype, "bfloat16") || !strcmp(dtype, "float16")) return 2;
    if (!strcmp(dtype, "float32") || !strcmp(dtype, "int32")) return 4;
    if (!strcmp(dtype, "float64") || !strcmp(dtype, "int64")) return 8;
    return 0;
}

/* Parse one line of INDEX.txt; 1: a tensor, 0: a comment or blank line, -1: malformed. */
static inline int fp8_golden_parse(const char *line, fp8_golden_tensor *t) {
    char shape[128];
    long long offset, bytes;
    int64_t elements = 1;
    if (line[0] == '#' || line[0] == '\\n' || line[0] == 0) return 0;
    if (sscanf(line, "%127[^\\t]\\t%15[^\\t]\\t%95[^\\t]\\t%23[^\\t]\\t%127[^\\t]\\t%lld\\t%lld",
               t->case_name, t->role, t->name, t->dtype, shape, &offset, &bytes) != 7) return -1;
    t->offset = offset;
    t->bytes = bytes;
    t->rank = 0;
    if (strcmp(shape, "-")) {
        char *next = shape;
        while (*next) {
            if (t->rank == 8) return -1;
            t->shape[t->rank] = strtoll(next, &next, 10);
            elements *= t->shape[t->rank++];
            if (*next == 'x') next++;
            else if (*next) return -1;
        }
    }
    return elements * fp8_golden_itemsize(t->dtype) == t->bytes ? 1 : -1;
}

#endif
"""

SCHEMA_JSON = """{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "title": "fp8-oracle.golden-export/1",
  "type": "object",
  "required": ["schema", "generator", "alignment", "cases"],
  "additionalProperties": false,
  "properties": {
    "schema": {"const": "fp8-oracle.golden-export/1"},
    "generator": {"type": "string"},
    "alignment": {"const": 64},
    "cases": {
      "type": "array",
      "items": {
        "type": "object",
        "required": ["case", "id", "contract", "seed", "options", "judged", "numerics", "file", "tensors"],
        "additionalProperties": false,
        "properties": {
          "case": {"type": "string"},
          "id": {"type": "string"},
          "contract": {"type": "string"},
          "seed": {"type": "integer", "minimum": 0},
          "options": {"type": "object"},
          "judged": {"enum": ["bits", "interval", "contract"]},
          "numerics": {"type": "object", "additionalProperties": {"type": "string"}},
          "file": {"type": "string"},
          "tensors": {
            "type": "array",
            "items": {
              "type": "object",
              "required": ["name", "role", "dtype", "shape", "strides", "offset", "bytes", "sha256"],
              "additionalProperties": false,
              "properties": {
                "name": {"type": "string"},
                "role": {"enum": ["input", "expected", "low", "high", "free"]},
                "dtype": {"type": "string"},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "strides": {"type": ["array", "null"], "items": {"type": "integer"}},
                "offset": {"type": "integer", "multipleOf": 64},
                "bytes": {"type": "integer", "minimum": 0},
                "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}
              }
            }
          }
        }
      }
    }
  }
}
"""
