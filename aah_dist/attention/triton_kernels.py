"""Triton kernels of windowed attention: forward, dQ, and dK with dV, each for all heads in one launch.

Imported by triton_attention.py when the backend first runs, never before: importing triton is slow, and
TRITON_INTERPRET has to be set earlier.

Query i of head h reads keys j with i - W < j <= i, W = windows[h], W <= T.  `plan` is int32 [2 H + H_kv] on the
device: the windows, the heads by falling window, the key/value heads by falling work.  A program computes one tile of
rows of one head of one sample; the programs of wide heads, and of the rows in them that have most work, have the lowest
numbers and start first.  Its loop runs over the tiles that the head's band touches and no others.  The forward kernel
masks only those on an edge of the band; the backward ones mask all, because the registers that three loops take there
spill.  Scores carry the factor log2(e), so exponentials are powers of two.

q, out and their gradients are [B, H, T, SIZE], k, v and theirs [B, H_kv, T, SIZE]; `*_strides` are those of the first
three dimensions, the last one's is 1.  Per-row numbers (log-sum-exp, delta) are contiguous fp32 [B, H, T], the row
keys of dropout.py int32 [B, H, T, 2].  Offsets of heads and tiles are 64-bit, those within a tile 32-bit.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING_YET = tl.constexpr(-3.0e38)  # below every score; -inf would give NaN while a row has met masked keys only
# The constants of dropout.py's mask.
GOLDEN = tl.constexpr(0x9E3779B9)
MIX_1 = tl.constexpr(0x85EBCA6B)
MIX_2 = tl.constexpr(0xC2B2AE35)


@triton.jit
def _head(tensor, strides, b, h):
    """Pointer to [b, h, 0, 0]."""
    return tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def _load(head, start, stride, T, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
          PARTIAL: tl.constexpr):
    """Rows from `start` on, [BLOCK, BLOCK_D], zero where there are none; PARTIAL: some may be past the last row."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = head + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if PARTIAL:
        tile = tl.load(at, mask=(start + row < T) & (column < SIZE), other=0.0)
    elif SIZE < BLOCK_D:
        tile = tl.load(at, mask=column < SIZE, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _store(head, start, stride, T, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = head + tl.cast(start, tl.int64) * stride + (row * stride + column)
    tl.store(at, tile.to(head.dtype.element_ty), mask=(start + row < T) & (column < SIZE))


@triton.jit
def _in_band(i, j, window):
    return (j <= i) & (i - j < window)


@triton.jit
def _key_range(row, window, T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that query rows row .. row + BLOCK_M - 1 read: the start of the first one's tile, and the end."""
    return tl.maximum(0, row - window + 1) // BLOCK_N * BLOCK_N, tl.minimum(T, row + BLOCK_M)


@triton.jit
def _dropped(key_1, key_2, j, limit):
    """dropout.drop_mask: row keys and key numbers, broadcast against each other -> whether a cell is dropped.

    limit is 65536 times that function's threshold, so that comparing a half with the threshold is comparing the word
    that has this half on top."""
    word = key_1.to(tl.uint32, bitcast=True) + (j // 2).to(tl.uint32) * GOLDEN
    word = (word ^ (word >> 16)) * MIX_1
    word = word ^ key_2.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 15)) * MIX_2
    word = word ^ (word >> 16)
    half_on_top = word << ((j % 2 == 0).to(tl.uint32) * 16)
    return half_on_top.to(tl.int32, bitcast=True) < limit


@triton.jit
def _row_keys(keys, rows, inside):
    return tl.load(keys + 2 * rows, mask=inside, other=0), tl.load(keys + 2 * rows + 1, mask=inside, other=0)


@triton.jit
def forward(q, k, v, out, log_sums, plan, keys, q_strides, k_strides, v_strides, out_strides, B, H, group, T, scale,
            limit, keep_scale, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr):
    """out, and log_sums: the base-2 log-sum-exp of each row."""
    tiles = tl.cdiv(T, BLOCK_M)
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    b = tl.program_id(0) // tiles % B
    h = tl.load(plan + H + tl.program_id(0) // tiles // B)
    window = tl.load(plan + h)
    i = first_row + tl.arange(0, BLOCK_M)
    rows = (b * H + h).to(tl.int64) * T + i
    k_head, v_head = _head(k, k_strides, b, h // group), _head(v, v_strides, b, h // group)
    q_tile = _load(_head(q, q_strides, b, h), first_row, q_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
    if DROPOUT:
        key_1, key_2 = _row_keys(keys, rows, i < T)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first, end = _key_range(first_row, window, T, BLOCK_M, BLOCK_N)
    # The tiles inside the band of every row, which need no mask; before and after them those on its edges.
    inner_end = (first_row + 1) // BLOCK_N * BLOCK_N
    inner = tl.minimum(tl.cdiv(tl.maximum(0, first_row + BLOCK_M - window), BLOCK_N) * BLOCK_N, inner_end)
    bounds = (first, inner, inner_end, end)
    for part in tl.static_range(3):
        for start in tl.range(bounds[part], bounds[part + 1], BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            k_tile = _load(k_head, start, k_strides[2], T, SIZE, BLOCK_N, BLOCK_D, part != 1)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2_E)
            if part != 1:
                scores = tl.where(_in_band(i[:, None], j[None, :], window), scores, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            p = tl.exp2(scores - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(p, 1)
            if DROPOUT:
                p = tl.where(_dropped(key_1[:, None], key_2[:, None], j[None, :], limit), 0.0, p)
            v_tile = _load(v_head, start, v_strides[2], T, SIZE, BLOCK_N, BLOCK_D, part != 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
            peak = new_peak
    total = tl.where(i < T, total, 1.0)
    if DROPOUT:
        acc = acc * keep_scale
    _store(_head(out, out_strides, b, h), first_row, out_strides[2], T, acc / total[:, None], SIZE, BLOCK_M, BLOCK_D)
    tl.store(log_sums + rows, peak + tl.log2(total), mask=i < T)


@triton.jit
def backward_q(q, k, v, out, grad, dq, log_sums, deltas, plan, keys, q_strides, k_strides, v_strides, out_strides,
               grad_strides, dq_strides, B, H, group, T, scale, limit, keep_scale, SIZE: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr):
    """dq, and deltas: the sums of out * grad over the head size, which backward_kv reads."""
    tiles = tl.cdiv(T, BLOCK_M)
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    b = tl.program_id(0) // tiles % B
    h = tl.load(plan + H + tl.program_id(0) // tiles // B)
    window = tl.load(plan + h)
    i = first_row + tl.arange(0, BLOCK_M)
    rows = (b * H + h).to(tl.int64) * T + i
    k_head, v_head = _head(k, k_strides, b, h // group), _head(v, v_strides, b, h // group)
    grad_tile = _load(_head(grad, grad_strides, b, h), first_row, grad_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
    out_tile = _load(_head(out, out_strides, b, h), first_row, out_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
    delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(deltas + rows, delta, mask=i < T)
    q_tile = _load(_head(q, q_strides, b, h), first_row, q_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
    log_sum = tl.load(log_sums + rows, mask=i < T, other=0.0)
    if DROPOUT:
        key_1, key_2 = _row_keys(keys, rows, i < T)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first, end = _key_range(first_row, window, T, BLOCK_M, BLOCK_N)
    for start in tl.range(first, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k_tile = _load(k_head, start, k_strides[2], T, SIZE, BLOCK_N, BLOCK_D, True)
        v_tile = _load(v_head, start, v_strides[2], T, SIZE, BLOCK_N, BLOCK_D, True)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(_in_band(i[:, None], j[None, :], window), scores, -float("inf"))
        p = tl.exp2(tl.minimum(scores - log_sum[:, None], 0.0))
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
        if DROPOUT:
            dropped = _dropped(key_1[:, None], key_2[:, None], j[None, :], limit)
            dp = tl.where(dropped, 0.0, dp * keep_scale)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    _store(_head(dq, dq_strides, b, h), first_row, dq_strides[2], T, acc * scale, SIZE, BLOCK_M, BLOCK_D)


@triton.jit
def backward_kv(q, k, v, grad, dk, dv, log_sums, deltas, plan, keys, q_strides, k_strides, v_strides, grad_strides,
                dk_strides, dv_strides, B, H, group, T, scale, limit, keep_scale, SIZE: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr):
    """dk and dv, summed over the `group` query heads of a key/value head in their order, each with its own window.

    Scores are computed transposed, [keys, queries], as they are needed on the left of both products."""
    tiles = tl.cdiv(T, BLOCK_N)
    first_key = tl.program_id(0) % tiles * BLOCK_N
    b = tl.program_id(0) // tiles % B
    kv_head = tl.load(plan + 2 * H + tl.program_id(0) // tiles // B)
    j = first_key + tl.arange(0, BLOCK_N)
    k_tile = _load(_head(k, k_strides, b, kv_head), first_key, k_strides[2], T, SIZE, BLOCK_N, BLOCK_D, True)
    v_tile = _load(_head(v, v_strides, b, kv_head), first_key, v_strides[2], T, SIZE, BLOCK_N, BLOCK_D, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group):
        h = kv_head * group + member
        window = tl.load(plan + h)
        row_0 = (b * H + h).to(tl.int64) * T
        q_head, grad_head = _head(q, q_strides, b, h), _head(grad, grad_strides, b, h)
        end = tl.minimum(T, first_key + BLOCK_N - 1 + window)
        for start in tl.range(first_key // BLOCK_M * BLOCK_M, end, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            q_tile = _load(q_head, start, q_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
            grad_tile = _load(grad_head, start, grad_strides[2], T, SIZE, BLOCK_M, BLOCK_D, True)
            log_sum = tl.load(log_sums + row_0 + i, mask=i < T, other=0.0)
            delta = tl.load(deltas + row_0 + i, mask=i < T, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * (scale * LOG2_E)
            scores = tl.where(_in_band(i[None, :], j[:, None], window), scores, -float("inf"))
            p = tl.exp2(tl.minimum(scores - log_sum[None, :], 0.0))
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
            kept = p
            if DROPOUT:
                key_1, key_2 = _row_keys(keys, row_0 + i, i < T)
                dropped = _dropped(key_1[None, :], key_2[None, :], j[:, None], limit)
                kept = tl.where(dropped, 0.0, p)
                dp = tl.where(dropped, 0.0, dp * keep_scale)
            dv_acc = tl.dot(kept.to(grad_tile.dtype), grad_tile, dv_acc, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    _store(_head(dk, dk_strides, b, kv_head), first_key, dk_strides[2], T, dk_acc * scale, SIZE, BLOCK_N, BLOCK_D)
    if DROPOUT:
        dv_acc = dv_acc * keep_scale
    _store(_head(dv, dv_strides, b, kv_head), first_key, dv_strides[2], T, dv_acc, SIZE, BLOCK_N, BLOCK_D)
