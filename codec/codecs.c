/* SPDX-License-Identifier: Apache-2.0
 *
 * codecs.c: the one list of codecs. Nothing registers itself.
 */
#include "codec/codec_exact.h"
#include "codec/codec_kivi.h"
#include "codec/codec_raw.h"
#include "codec/codec_saw.h"
#include "codec/codec_tq.h"

#include <stddef.h>

const struct kvf_codec_ops *const kvf_codecs[] = {
    &kvf_codec_raw, &kvf_codec_exact, &kvf_codec_saw, &kvf_codec_tq, &kvf_codec_kivi, NULL,
};

const struct kvf_codec_ops *kvf_codec_find(uint8_t id)
{
    for (const struct kvf_codec_ops *const *codec = kvf_codecs; *codec != NULL; codec++) {
        if ((*codec)->id == id) {
            return *codec;
        }
    }
    return NULL;
}
