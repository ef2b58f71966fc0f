// Dense products that MLX computes with a BLAS (`blas.c`), on the threads of the packed ones.
#pragma once

namespace afm {

// Hands the pool to `afm_blas.so`. Nothing happens where that isn't loaded.
void share_with_blas();

}  // namespace afm
