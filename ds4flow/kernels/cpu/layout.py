"""Where things lie in the int64 records that Python fills and the kernels read (byte offsets)."""

from __future__ import annotations


def _fields(count: int) -> range:
    return range(0, 8 * count, 8)


# matrix: product kernel, address of row 0, bytes of a row, rows, columns, and 1 + the order of
# the rounded activations that it takes, 0 for none
MATRIX_KERNEL, MATRIX_ADDRESS, MATRIX_STRIDE, MATRIX_ROWS, MATRIX_COLUMNS, MATRIX_ROUNDED = _fields(
    6
)
MATRIX_SIZE = 48

# one matrix product of a batch: matrix, x, bytes of its rows, rows, y, bytes of its rows, rounded x
(
    TASK_MATRIX,
    TASK_X,
    TASK_X_STRIDE,
    TASK_COUNT,
    TASK_Y,
    TASK_Y_STRIDE,
    TASK_ROUNDED,
) = _fields(7)
TASK_SIZE = 56

# the context that every kernel gets first
(
    CONTEXT_THREADS,
    CONTEXT_RUNNER,
    CONTEXT_BATCH,
    CONTEXT_PRODUCTS_JOB,
    CONTEXT_ATTEND_JOB,
    CONTEXT_INDEX_JOB,
    CONTEXT_HC_PRE,
    CONTEXT_HC_POST,
    CONTEXT_QUERIES,
    CONTEXT_KV_ROWS,
    CONTEXT_COMPRESS,
    CONTEXT_INDEX_TOPK,
    CONTEXT_ATTEND,
    CONTEXT_ATTENTION_OUTPUT,
    CONTEXT_MOE,
    CONTEXT_STACK,
    CONTEXT_HC_HEAD,
    CONTEXT_TABLES,
    CONTEXT_SCRATCH,
    CONTEXT_SCRATCH_STRIDE,
    CONTEXT_ARENA,
    CONTEXT_ROUNDED,
    CONTEXT_CONTROL,
    CONTEXT_DIM,
    CONTEXT_HEADS,
    CONTEXT_HEAD_DIM,
    CONTEXT_ROPE_DIM,
    CONTEXT_Q_RANK,
    CONTEXT_GROUPS,
    CONTEXT_O_RANK,
    CONTEXT_WINDOW,
    CONTEXT_INDEX_HEADS,
    CONTEXT_INDEX_DIM,
    CONTEXT_TOP_K,
    CONTEXT_EXPERTS,
    CONTEXT_USED,
    CONTEXT_SINKHORN,
    CONTEXT_KV_FP8,
    CONTEXT_INDEX_FP4,
    CONTEXT_EXPERT_NORM,
    CONTEXT_EPS,  # from here on: float32 in the low half
    CONTEXT_EPS_HC,
    CONTEXT_EXPERT_SCALE,
    CONTEXT_JOB_FIELDS,  # room for the arguments of a parallel job
) = _fields(44)
CONTEXT_SIZE = CONTEXT_JOB_FIELDS + 8 * 16

# the thread pool, its parts on cache lines of their own: the word that shares are taken from
# (epoch, number of shares, next share), shares done, times that a worker fell asleep, the job
# (kernel, context), and from there on one flag per worker, 1 when it sleeps
CONTROL_WORD, CONTROL_DONE, CONTROL_PARKED, CONTROL_JOB, CONTROL_SLEEPS = range(0, 5 * 64, 64)

# hyper-connection: matrix, 24 (or 4, padded to 16) scales and bases, norm weight
HYPER_MATRIX, HYPER_SCALE, HYPER_BASE, HYPER_NORM = _fields(4)
HYPER_SIZE = 32

# attention part of a layer
(
    ATTENTION_Q_A,
    ATTENTION_Q_A_NORM,
    ATTENTION_Q_B,
    ATTENTION_KV,
    ATTENTION_KV_NORM,
    ATTENTION_SINKS,
    ATTENTION_OUT_A,  # an array of one matrix per group
    ATTENTION_OUT_B,
) = _fields(8)
ATTENTION_SIZE = 64

# compressor, and the buffers it writes
COMPRESSOR_KV, COMPRESSOR_GATE, COMPRESSOR_APE, COMPRESSOR_NORM = _fields(4)
COMPRESSOR_SIZE = 32
(
    POOL_RATIO,
    POOL_SLOTS,
    POOL_WIDTH,
    POOL_OVERLAPPING,
    POOL_VALUES,
    POOL_SCORES,
    POOL_ROWS,
) = _fields(7)
POOL_SIZE = 56

# cache rows of a layer: window ring and its length, pool record or 0
ROWS_WINDOW, ROWS_SLOTS, ROWS_POOL = _fields(3)
ROWS_SIZE = 24

# indexer
INDEXER_Q_B, INDEXER_PROJ = _fields(2)
INDEXER_SIZE = 16

# mixture of experts; `0` for an absent bias or table; gate, up and down are arrays of matrices
(
    MOE_ROUTER,
    MOE_BIAS,
    MOE_TABLE,
    MOE_GATE,
    MOE_UP,
    MOE_DOWN,
    MOE_SHARED_GATE,
    MOE_SHARED_UP,
    MOE_SHARED_DOWN,
    MOE_CLAMP,  # float32
    MOE_CLAMP_SHARED,  # float32
) = _fields(11)
MOE_SIZE = 88

# one layer of a stack; 0 for an absent compressor or indexer
(
    LAYER_HC_ATTN,
    LAYER_ATTENTION,
    LAYER_COMPRESSOR,
    LAYER_INDEXER,
    LAYER_INDEX_COMPRESSOR,
    LAYER_HC_FFN,
    LAYER_MOE,
    LAYER_ROPE,
    LAYER_ROWS,
    LAYER_INDEX_POOL,
) = _fields(10)
LAYER_SIZE = 80

# the trunk: how rows of the embedding are looked up, where they lie, the layers, the head
(
    TRUNK_LOOKUP,
    TRUNK_ROWS,
    TRUNK_STRIDE,
    TRUNK_LAYERS,
    TRUNK_COUNT,
    TRUNK_HYPER,
    TRUNK_OUTPUT,
) = _fields(7)
TRUNK_SIZE = 56

# a pass of the MTP block: its weights; how a token becomes its part of the input (embedding as of
# the trunk); what changes from pass to pass; and what a chain of passes needs beside
(
    DRAFT_NORM,
    DRAFT_PROJECTION,
    DRAFT_HYPER,
    DRAFT_OUTPUT,
    DRAFT_LAYER,
    DRAFT_LOOKUP,
    DRAFT_EMBEDDING,
    DRAFT_STRIDE,
    DRAFT_TOKEN_NORM,
    DRAFT_TOKEN_PROJECTION,
    DRAFT_TOKENS,  # the tokens' part of the input, [rows, dim]
    DRAFT_STREAMS,
    DRAFT_IDS,
    DRAFT_ROWS,
    DRAFT_WRITTEN,
    DRAFT_FIRST,
    DRAFT_OUT,
    DRAFT_LOGITS,
    DRAFT_ROOM,
    DRAFT_RESULTS,
    DRAFT_COUNT,  # most passes
    DRAFT_GATE,  # gap of the two largest logits below which the chain ends (float64)
    DRAFT_END,  # the token that ends it
    DRAFT_FORCED,  # tokens to go on with in place of the block's own choices, or 0
    DRAFT_SPARE,  # room for the tokens' part, [rows, dim], and the streams of the first pass
    DRAFT_STALE,  # streams of the pairs that are only written, [rows - 1, 4, dim]
    DRAFT_MADE,  # passes that were made
) = _fields(27)
DRAFT_SIZE = 216
CHAIN_RESULTS = 192  # bytes between the results of two passes
