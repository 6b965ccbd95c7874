"""The columns of the statistics array: all that passes from the attention layers to the controller.

float64 [layers, query heads, len(COLUMNS)].  Sums, so that adding over batch, sequence and data-parallel ranks, and
over the heads of a group, loses nothing.
"""

COLUMNS = (
    "rows",  # query rows: batch x tokens
    "values",  # elements of q, of k or of v: batch x tokens x head size
    "q_sum", "q_square", "q_abs",
    "k_sum", "k_square", "k_abs",
    "v_sum", "v_square", "v_abs",
    "entropy",  # over query rows: -sum_j A ln(A + 1e-9), in nats
    "norm",  # over query rows: L2 norm of the head's output
    "last_mass",  # over the batch: A[T-1, T-1]
)
