from numba import njit


def kernel(f):
    return njit(nogil=True, error_model="numpy", cache=True)(f)
