"""sm90's unit for ``rcp.approx``, ``ex2.approx``, ``rsqrt.approx`` and ``tanh.approx``, bit for bit; float64 values of
float32.

A significand is cut into its first 7 or 6 bits, which choose a row ``C0, C1, C2``, and the rest ``n`` of L bits:

    Y = floor((C0 2^(2L-2) + sign C1 n 2^L + C2 square(n) + bias) / 2^(2L))        a significand of 24 bits

``square(n)`` is the sum of the products of two bits of ``n`` (those of unlike bits twice) whose weight is at least 2^17
(L = 16) or 2^19 (L = 17): the unit drops the others.

    rcp      of y = 1.f 2^e         Y 2^(-24 - e)        128 rows, L = 16, falling
    rsqrt    of x = m 4^h, m < 4    Y 2^(-24 - h)        64 rows below 2 and 64 from 2 on, L = 17, falling; 1 for m = 1
    ex2      of x = i + f           Y 2^(-23 + i)        64 rows, L = 17, rising

``ex2`` takes ``|x|`` cut after 23 binary digits, and of a negative one all bits inverted (less by 2^-23 than minus it)
but where x is an integer or nothing is left of it.

``tanh`` of ``2^-8 <= |x| < 8`` takes for each binade of x the first 0 to 4 bits behind the leading one for a row and
the next 17 for ``n``, drops the others, and cuts

    C0 + C1 n / 2^17 - C2 square(n) / 2^34        in units of 2^-23 of the largest result of the row

to a significand of 24 bits. Below it gives x, and from 8 on 1, with the sign of x.

Source: derived from every step that an H200 gave for 2^23 values of ``rcp``, 2^24 of ``rsqrt`` and the binades from
2^-4 to 2^3 of both signs of ``ex2`` (``tests/hardware/approximations.py``): all 143 million are those of this file. So
are 2^20 random values of ``ex2`` of each binade from 2^-30 to 2^7 and each sign, on an H100. The form is that of
Oberman and Siu, "A high-performance area-efficient multifunction interpolator", ARITH 2005.
The 51 rows of ``tanh`` are the only ones that 39,424 recorded values of an H100 admit (448 to 3,584 a row); it gave x
below 2^-8 and 1 from 8 on for every float32.
NaN gives NaN. Not covered: sine, logarithm; other architectures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from oracle.numbers.rounding import exponent_of, power_of_two

SMALLEST_NORMAL: Final = 2.0**-126
FRACTION: Final = 23
RECIPROCAL: Final = (
    "40000001FFFC3F53F80FE21F8143DD3F03F061F05A3C63E88CB51E8CE3B13E0F83E1E16C39B3D980F81DA363863D226381D32A373"
    "3CAE75A1CC4435F3C3C3C41C58634D3BCBADE1BEEE33B3B5CC111B87A3293AEF6CB1B2283173A83A851ABFA3063A196B41A5EE2F6"
    "39B0AD31A0022E6394966219A362D738E38E5194882C7387F1E218EF82B8381C0E2189862AA37BA5721843029D3759F2317EF6290"
    "36FAD89179D6282369D037174D227736406CA16FE626A35E50D916B1225D358AE06166582523531DEE161B424634DA03615D2823C"
    "3483486158B2231342DA811545022533D91D51500621C3385A2B14BCE2113333335147AC20732E1CA11439E1FE329162013FA21F5"
    "3241F6B13BB81EA31F3833137E21E231A60341341E1DA31597241306A1D1310DCC112CC81C930C30C5129361C130792F1125B41B9"
    "3030305122421B12FE80C211EE01AA2FA0BEA11B8C1A22F5A4431184819C2F14992115101932ECFB9E111E818D2E8BA3110ECE186"
    "2E4851110BC017F2E05C0C108C01792DC3EF0105CE1732D82D85102E816E2D4279C1000C1662D02D040FD3E1612CC3D8E0FA7C15C"
    "2C8590D0F7C41552C47F520F51A1512C0B02E0F27814B2BCEB780EFE21462B931070ED561402B580B00EAD613C2B1DA490E85E136"
    "2AE3DA90E5F01312AAAAAC0E38E12E2A7212C0E1341292A3A1000DEE21232A02A040DC9A11F29CBC170DA5C11B29957120D826117"
    "295FAD60D5F8112292A73F0D3D410F28F5C2B0D1B610A28C197B0CFA2107288DF0E0CD94102285ACC60CB9010028282850C9920FB"
    "27F602A0C79C0F827C459A0C5AC0F327932B60C3C40F027627640C1E40ED27323880C00A0E927027050BE380E726D31C10BC6A0E2"
    "26A43A10BAA40DF2675C8D0B8E60DE2647C6B0B72C0DA261A3220B5780D625ED09A0B3CC0D425C04BB0B2240D02593F6B0B0820CD"
    "25680980AEE80CC253C8270AD500C725116040ABC00C524E6A190AA360C424BC4500A8B00C124924940A72E0BD2468AD10A5B20BA"
    "243F6F30A43C0B824168E30A2CA0B623EE0920A15E0B423C5DE909FF60B2239E0D709E920AF237694A09D340AD234F72E09BDA0AB"
    "2328A7109A840A92302304099320A622DC0D3097E60A522B63CE0969C0A12290BE4095580A0226B9040941809F2246B1F092DA09B"
    "2222224091A209A21FDE040906E09921D9EAF08F3C09621B641808E100952192E2C08CE6093216FCDF08BC0091214D02408A9E08F"
    "212A7E80898008F21084230886408C20E64C40874C08A20C49BD0863808920A33010852608720820840841808520612390830E084"
    "204081108206083202020308102082"
)
POWER: Final = (
    "2000003162E41EE205934A166C01F520B361E16AA81FA210E8A516E9C1FF216AB121729820621C7D89176A4209222603C17AB820F"
    "228535917ED821422E570C1830021D2346B811873822223A90E818B7C227240C77518FC822F2470F511942423424D68B01988C238"
    "253D3C319CFC24125A50B91A17C247260DFC51A60824D267811A1AAA025426E34E91AF48258274FB6A1B3F826127BD4CC1B8B8267"
    "282C1481BD8426E289C10E1C260273290D4591C748279297FB5D1CC3C28129F36511D1402872A6856D1D65028F2ADE8EA1DB70295"
    "2B560FE1E09C29E2BCEDE51E5D82A52C48FDA1EB202AE2CC47131F07C2B32D413CF1F5E42BB2DBF64B1FB5C2C12E3EEC1200E02CB"
    "2EBFD6D206782D12F4229120C1C2DA2FC5E6A211D02E3304B137217942EC30D1B3621D6C2F13159CAB223502FB31E35D622944305"
    "326E6FA22F4C30B32FB05723564313338923323B8C31C3418CD2241C432634AA0792481032D353CD6D24E6C33635D13F7254D8341"
    "366745A25B5834A36FEEE1261EC35137983D62689035A383338026F4436638CFE2A2761036D396E41F27CEC3773A0E5AD283DC380"
    "3AB032028ADC38D3B53CC4291F43953BF92EA2992039D3CA05E02A05C3AA3D495F82A7B03B23DF43822AF143BF3EA0ECF2B6903C9"
    "3F4F8342BE203D4"
)
ROOT: Final = (
    "3FFFFFE1FFF65E43F817AE1F4305AA3F05D901E8DE5743E8CFE41DDF65403E16D091D3765103DA336E1C9564E23D3219A1BF924B6"
    "3CC36261B62648C3C56FBC1AD0E4643BECD131A44443E3B84CF519BC841C3B1EE40193923F83ABAFD318BA23D83A590A7183F43B8"
    "39F8FB417C8439A399AC091755037C393E4B716E5636238E38E416794348388A7B11610432E383305615AA831637DD20B1547C2FE"
    "3788C1214E7E2E83735DB6148AE2D436E464A143082C0369452613D8A2AC36459AC1383429835F833C1330428635AC14512DF8274"
    "35613371290E26235178891244825434CF0B511FA02443487B4111B1A23634417AF116B022633FC5881126421833B845710E3420C"
    "33753B510A1E1FE3333334106221F032F226D102401E432B20FF0FE761D83272E860FAC41CE3234AAD0F7281C231F75130F3A21B8"
    "31BAD680F0321AE317F3560ECD61A4314468C0E98E19A310A6BB0E65A19230D139B0E3381883098CDD0E02617E306123F0DD28176"
    "302A3780DA3A16E2FF40480D75C1662FBE86F0D4901602F89BAE0D1D21582F559C60CF221502F2227E0CC8214A2EEF59B0C9F0144"
    "2EBD2E90C76A13C2E8BA300C4F21342E5AB3B0C28812E2E2A5D60C02A1282DFA9D10BDD81222DCB6F90BB9211E2D9CD270B958118"
    "2D6EC260B728112"
)
ROOT_FROM_2: Final = (
    "2D413CA16A0242A2CE7C63161B04022C905A7159AE3DA2C3AE56151F83B62BE754B14A8C3962B9596D143623742B459B213C7C356"
    "2AF7515135D23382AAAAAB12F6431C2A5F9881292C3002A160D61232C2E629CDFBE11D5E2CE298757E117C22B82942153112522A0"
    "28FE28810D1028C28BB876107FA278287A26C1030A2642839FD20FE4225227FB0110F9A024027BD2920F52022E27806CA0F0C221E"
    "2744C380EC8620E270A2580E86A20026D08B00E46A1F02697EC80E0881E2266042F0DCC21D6262987A0D9181CA25F3B410D5861BC"
    "25BEC180D20E1B2258AAA70CEAC1A425576880CB6219A2524F680C82E18E24F34E80C51018624C26BD0C20617C24924940BF10172"
    "2462E1B0BC2C168243430B0B95C160240631A0B69C15623D8E030B3EE14E23AC3830B15214623803550AEC413E2354D3E0AC46136"
    "232A0FE0A9D813022FFE5E0A77812822D651F0A52612222AD50F0A2E211C2284DF80A0AA114225CFA009E8011022359DC09C6210A"
    "220EC7A09A5010421E874B098480FC21C2A1E0964E0F8219D4C70945E0F42178720092780EE21540F70909C0EA213022D08ECA0E4"
    "210CA9408D020E020E9A0908B440DC20C70680898E0D620A4D89087E20D2208314B0863E0CE2061B8A084A20CA2040C280830E0C6"
    "2020308081840C2"
)
"""Rows of 15 hexadecimal digits: 7 of ``C0``, 5 of ``C1``, 3 of ``C2``."""
TANGENT: Final = (
    "800000800000001007FFF807FFE00003007FFD807FFA0000D007FF5603FF10000A40BFDC203FDC8000DC07FD5603FC300027C0BF"
    "70603F7400037807F56681F8280022F09EB5D81F3C8002A40BDC7F01EE80003160DC7E801E8540037B07D65E01E1880081509AFC"
    "981D1500096C0B77A801BE6E00A7E0D2B9401A96600B4E0764D28192E60181208DFA501627C018900A299681312E017960B43388"
    "101E6015A70C2F8480D68A0132F8CF2EB80B02E0108F0D9298808F1A00DF40E13CB40733D00B918E7B82005C26009750ECE3C404"
    "948007A90F0FE3803A02006240F43C7C02DC4004E68F6CAA002402803E4AF8CCC101C4380312EFA6005016248026AAFB9BCD0115"
    "4801E68FC92D100D8B8017CEFD53D500A94C012A8FDEA8F00842400E96FE602D00671C00B68FEBBEE005068008E6FF037A003EB0"
    "006F2FF3B400030DC0056AFF66B90026140043AFF8898001DAC0034AFFA2FD00171C0028EFFB78D001200001FCFFC792000E0400"
    "18AFFD43000293000DB0FFEFE0000F3000510FFFA10000590001D0FFFDD0000210000B0FFFF340000C000040FFFFB40000500002"
    "0FFFFE400002000010FFFFF400001000008"
)
"""Rows of 17 hexadecimal digits: 6 of ``C0``, 6 of ``C1``, 5 of ``C2``."""
TANGENT_ROWS: Final = {-8: 0, -7: 0, -6: 0, -5: 1, -4: 1, -3: 2, -2: 2, -1: 2, 0: 3, 1: 4, 2: 3}
"""By the exponent of x: bits that choose a row."""
BIAS: Final = {RECIPROCAL: 2023 << 17, POWER: 6114 << 19, ROOT: 16383 << 18, ROOT_FROM_2: 16383 << 18}


def reciprocal(y: Tensor) -> Tensor:
    """``rcp.approx.ftz(y)`` of float64 values of float32 that are not subnormal, any shape; float64 of the same shape.

    Zeros give infinity of their sign, infinities zero of their sign.
    """
    number = torch.isfinite(y) & (y != 0)
    magnitude = torch.where(number, y.abs(), torch.ones_like(y))
    e = exponent_of(magnitude)
    value = _significand(RECIPROCAL, _fraction(magnitude, e)) * power_of_two(-24 - e)
    return torch.where(number, torch.copysign(flush(value), y), torch.ones_like(y) / y)


def exp2(x: Tensor) -> Tensor:
    """``ex2.approx.ftz(x)`` of float64 values of float32 of any shape; float64 of the same shape. 0 below 2^-126,
    infinity from 128 on."""
    bounded = torch.nan_to_num(x, 0.0).clamp(-1024.0, 1024.0)
    cut = torch.floor(bounded.abs() * 2.0**FRACTION).to(torch.int64)
    inverted = torch.where((bounded == torch.floor(bounded)) | (cut == 0), -cut, ~cut)
    whole = torch.where(bounded < 0, inverted, cut)
    power = whole >> FRACTION
    value = _significand(POWER, whole & ((1 << FRACTION) - 1)) * power_of_two(power - FRACTION)
    value = torch.where(power > 127, torch.full_like(x, torch.inf), flush(value))
    return torch.where(torch.isnan(x), x, value)


def reciprocal_root(x: Tensor) -> Tensor:
    """``rsqrt.approx.ftz(x)`` of float64 values of float32 that are not subnormal, any shape; float64 of the same
    shape.

    Zeros give infinity of their sign, infinity 0, negative values NaN.
    """
    number = torch.isfinite(x) & (x > 0)
    magnitude = torch.where(number, x, torch.ones_like(x))
    e = exponent_of(magnitude)
    fraction, half = _fraction(magnitude, e), e >> 1
    below, above = (_significand(table, fraction) for table in (ROOT, ROOT_FROM_2))
    value = torch.where(e % 2 == 0, below, above)
    value = torch.where((e % 2 == 0) & (fraction == 0), torch.full_like(value, 2.0**24), value)
    return torch.where(number, value * power_of_two(-24 - half), torch.rsqrt(x))


def tanh(x: Tensor) -> Tensor:
    """``tanh.approx(x)`` of float64 values of float32 of any shape, subnormals too; float64 of the same shape. The sign
    of a zero stays; infinities give 1 of their sign."""
    magnitude = torch.nan_to_num(x, nan=1.0, posinf=8.0, neginf=8.0).abs()
    least, most = min(TANGENT_ROWS), max(TANGENT_ROWS)
    inside = magnitude.clamp(2.0**least, 2.0 ** (most + 1) - 2.0**-20)
    e = exponent_of(inside)
    firsts, bits, tops, c0, c1, c2 = (part.to(x.device) for part in _tangent())
    own = bits[e - least]
    fraction = _fraction(inside, e)
    row, rest = firsts[e - least] + (fraction >> (FRACTION - own)), (fraction >> (FRACTION - 17 - own)) & 0x1FFFF
    total = (c0[row] << 34) + (c1[row] * rest << 17) - c2[row] * _squares(17).to(x.device)[rest]
    cut = torch.where(total < 1 << (FRACTION + 34), total >> 33 << 33, total >> 34 << 34)
    value = cut.to(torch.float64) * power_of_two(tops[e - least] - FRACTION - 34)
    value = torch.where(magnitude < 2.0**least, magnitude, torch.where(magnitude < 2.0 ** (most + 1), value, 1.0))
    return torch.where(torch.isnan(x), x, torch.copysign(value, x))


def power_rows() -> Tensor:
    """``C0``, ``C1`` and ``C2`` of :func:`exp2`, int64 ``[3, 64]``; do not write to it."""
    return _rows(POWER)


def power_squares() -> Tensor:
    """``square(n)`` of every ``n`` of 17 bits of :func:`exp2`, int64 ``[2^17]``; do not write to it."""
    return _squares(17)


def flush(x: Tensor) -> Tensor:
    """``x`` of any shape, float64 values of float32, with subnormals of float32 replaced by zeros of their sign;
    float64 of the same shape."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


def _fraction(magnitude: Tensor, e: Tensor) -> Tensor:
    """The 23 bits behind the leading one, int64."""
    return (magnitude * power_of_two(FRACTION - e)).to(torch.int64) - (1 << FRACTION)


def _significand(table: str, fraction: Tensor) -> Tensor:
    """``Y`` of 23 bits, float64."""
    rows, bits = _rows(table).to(fraction.device), FRACTION - (7 if table is RECIPROCAL else 6)
    c0, c1, c2 = rows[:, fraction >> bits]
    rest = fraction & ((1 << bits) - 1)
    sum_ = (c0 << (2 * bits - 2)) + (c1 * rest << bits) + c2 * _squares(bits).to(fraction.device)[rest] + BIAS[table]
    significand: Tensor = (sum_ >> (2 * bits)).to(torch.float64)
    return significand


@lru_cache(maxsize=1)
def _tangent() -> tuple[Tensor, ...]:
    """By the exponent of x its first row, the bits of a row and the exponent of its largest result; ``C0``, ``C1`` and
    ``C2`` by row; int64."""
    counts = [1 << bits for bits in TANGENT_ROWS.values()]
    by_exponent = (
        [sum(counts[:number]) for number in range(len(counts))],
        list(TANGENT_ROWS.values()),
        [min(e, -1) for e in TANGENT_ROWS],
    )
    words = [TANGENT[i : i + 17] for i in range(0, len(TANGENT), 17)]
    by_row = ([int(word[part], 16) for word in words] for part in (slice(6), slice(6, 12), slice(12, 17)))
    return tuple(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (*by_exponent, *by_row))


@lru_cache(maxsize=4)
def _rows(table: str) -> Tensor:
    """``C0``, signed ``C1`` and ``C2``, int64 ``[3, rows]``."""
    words = [table[i : i + 15] for i in range(0, len(table), 15)]
    sign = 1 if table is POWER else -1
    values = [(int(word[:7], 16), sign * int(word[7:12], 16), int(word[12:], 16)) for word in words]
    return torch.tensor(values, dtype=torch.int64, device="cpu").t().contiguous()


@lru_cache(maxsize=2)
def _squares(bits: int) -> Tensor:
    """``square(n)`` of every ``n`` of so many bits, int64."""
    n = torch.arange(1 << bits, dtype=torch.int64, device="cpu")
    square, least = torch.zeros_like(n), 17 if bits == 16 else 19
    for i in range(bits):
        for j in range(i, bits):
            weight = 2 * i if i == j else i + j + 1
            if weight >= least:
                square += ((n >> i) & (n >> j) & 1) << weight
    return square
