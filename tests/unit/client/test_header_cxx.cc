/* SPDX-License-Identifier: Apache-2.0
 *
 * test_header_cxx.cc: the public headers in a C++ program: they compile as C++11 without a warning,
 * and their functions have C names, so that they link.
 */
#include "kvferry_gpu_x.h"

#include <cstdio>
#include <cstring>

static_assert(sizeof(kvf_event) == 96, "the same layout as in C");

int main()
{
    if (std::strcmp(kvf_status_name(KVF_MISS), "miss") != 0 ||
        kvf_dtype_bytes(KVF_DTYPE_BF16) != 2) {
        std::puts("the library does not answer a C++ caller as it does a C one");
        return 1;
    }
    return 0;
}
