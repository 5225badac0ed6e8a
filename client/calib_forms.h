/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_forms.h: the ways to code K and V that a calibration tries.
 */
#ifndef KVF_CLIENT_CALIB_FORMS_H
#define KVF_CLIENT_CALIB_FORMS_H

#include "client/calib_measure.h"

enum kvf_form_codecs {
    KVF_FORMS_SAW = 1 << 0,
    KVF_FORMS_TQ = 1 << 1,
    KVF_FORMS_KIVI = 1 << 2,
    KVF_FORMS_ALL = 7,
};

/* Forms of K or V, from the widest down; the first one is lossless. Forms that no codec has for
 * this dim are left out. Returns how many. */
uint32_t kvf_forms_list(bool is_v, uint32_t dim, uint32_t codecs,
                        struct kvf_form forms_out[KVF_FORMS_MAX]);

/* "saw,tq,kivi" to bits; false: a name is none of these. */
bool kvf_form_codecs_parse(const char *text, uint32_t *codecs_out);

#endif /* KVF_CLIENT_CALIB_FORMS_H */
