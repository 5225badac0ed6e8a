/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_fault.c: what is wrong with a file, in one line.
 */
#include <stdarg.h>
#include <stdio.h>

#include "client/weights_file.h"

int kvf_weights_fault(char why[KVF_WEIGHTS_WHY_BYTES], int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, KVF_WEIGHTS_WHY_BYTES, format, args);
    va_end(args);
    for (char *c = why; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?'; /* names of files may hold anything */
        }
    }
    return status;
}
