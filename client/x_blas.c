/* SPDX-License-Identifier: Apache-2.0
 *
 * x_blas.c: find the library and the two functions.
 */
#include "client/x_blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

#define LIBRARY_DEFAULT "libopenblas.so.0"

int kvf_blas_open(struct kvf_blas *blas, char text[KVF_BLAS_TEXT_BYTES])
{
    const char *path = getenv("KVFERRY_BLAS");
    void *library;
    void *sgemm;
    void *dgesdd;

    if (path == NULL || path[0] == 0) {
        path = LIBRARY_DEFAULT;
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL) {
        snprintf(text, KVF_BLAS_TEXT_BYTES,
                 "no BLAS: %.120s; install OpenBLAS (apt-get install libopenblas0), or name a "
                 "library in KVFERRY_BLAS",
                 dlerror());
        return KVF_ERR_UNSUPPORTED;
    }
    sgemm = dlsym(library, "sgemm_");
    dgesdd = dlsym(library, "dgesdd_");
    (void)dlclose(library); /* it stays, by RTLD_NODELETE */
    if (sgemm == NULL || dgesdd == NULL) {
        snprintf(text, KVF_BLAS_TEXT_BYTES,
                 "%.120s has no %s: it is no BLAS with LAPACK; libopenblas0 is one", path,
                 sgemm == NULL ? "sgemm_" : "dgesdd_");
        return KVF_ERR_UNSUPPORTED;
    }
    memcpy(&blas->sgemm, &sgemm, sizeof(sgemm));
    memcpy(&blas->dgesdd, &dgesdd, sizeof(dgesdd));
    return KVF_OK;
}
