/* SPDX-License-Identifier: Apache-2.0
 *
 * calib_forms.c: see calib_forms.h. Names: codec and bits, then "+c" for means that are taken out
 * of each block and stored with it, "+p" for means that the profile has, "-g" and the size of
 * groups.
 */
#include "client/calib_forms.h"

#include <stdio.h>
#include <string.h>

enum {
    KIVI_GROUP = 64,
    KIVI_GROUP_SMALL = 32,
};

static const char *const codec_names[] = {"saw", "tq", "kivi"};

/* A list while it is made. */
struct list {
    struct kvf_form *forms;
    uint32_t n;
    uint32_t dim;
};

/* Append a form if its codec has it for this dim. */
static void add(struct list *list, const char *name, uint8_t rung,
                const struct kvf_profile_tensor *settings)
{
    struct kvf_codec_tensor tensor = {
        .ops = kvf_codec_find(settings->codec),
        .n_heads = 1,
        .dim = (uint16_t)list->dim,
        .dtype = KVF_DTYPE_BF16,
        .element_bytes = 2,
    };
    struct kvf_form *form = &list->forms[list->n];

    if (list->n < KVF_FORMS_MAX && tensor.ops->resolve(&tensor, settings) == KVF_OK &&
        tensor.descriptor.bits == settings->bits) {
        *form = (struct kvf_form){.rung = rung, .settings = *settings};
        snprintf(form->name, sizeof(form->name), "%s", name);
        list->n++;
    }
}

/* saw or tq of one width, with each way to take the means out. */
static void add_rotated(struct list *list, bool is_v, uint8_t codec, uint8_t rung)
{
    static const struct {
        const char *suffix;
        uint8_t flag;
    } centrings[] = {{"", 0}, {"+c", KVF_TENSOR_CENTER}, {"+p", KVF_TENSOR_CENTER_PROFILE}};
    struct kvf_profile_tensor settings = {
        .codec = codec,
        .bits = kvf_rung_bits[rung],
        .rotate = 1,
        .rot_seed = KVF_PROFILE_ROTATION_SEED,
    };
    char name[KVF_FORM_NAME_BYTES];

    if (codec == KVF_CODEC_SAW) {
        settings.clip = settings.bits >= 4 ? KVF_CLIP_FIXED : KVF_CLIP_SEARCH;
    }
    /* V's means are small beside it; the profile's would only cost */
    for (uint32_t i = 0; i < (is_v ? 2 : 3); i++) {
        settings.flags = KVF_TENSOR_SIGNS | centrings[i].flag;
        if (codec == KVF_CODEC_TQ) {
            settings.flags |= is_v ? KVF_TENSOR_SCALE_LEAST_SQUARES : KVF_TENSOR_SCALE_MATCHED;
        }
        snprintf(name, sizeof(name), "%s%u%s", codec_names[codec == KVF_CODEC_TQ], settings.bits,
                 centrings[i].suffix);
        add(list, name, rung, &settings);
    }
}

static void add_kivi(struct list *list, bool is_v, uint8_t rung)
{
    static const uint16_t sizes[] = {KIVI_GROUP, KIVI_GROUP_SMALL};
    char name[KVF_FORM_NAME_BYTES];

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvf_profile_tensor settings = {
            .codec = KVF_CODEC_KIVI,
            .bits = kvf_rung_bits[rung],
            .group_size = sizes[i],
            .group_axis = is_v ? KVF_AXIS_TOKEN : KVF_AXIS_CHANNEL,
        };

        snprintf(name, sizeof(name), "kivi%u-g%u", settings.bits, sizes[i]);
        add(list, name, rung, &settings);
    }
}

uint32_t kvf_forms_list(bool is_v, uint32_t dim, uint32_t codecs,
                        struct kvf_form forms_out[KVF_FORMS_MAX])
{
    static const struct kvf_profile_tensor exact = {
        .codec = KVF_CODEC_EXACT,
        .bits = KVF_BITS_EXACT,
    };
    struct list list = {.forms = forms_out, .dim = dim};

    add(&list, "exact", 0, &exact);
    for (uint8_t rung = 1; rung < KVF_RUNGS; rung++) {
        if ((codecs & KVF_FORMS_SAW) != 0) {
            add_rotated(&list, is_v, KVF_CODEC_SAW, rung);
        }
        if ((codecs & KVF_FORMS_TQ) != 0 && kvf_rung_bits[rung] <= 4) {
            add_rotated(&list, is_v, KVF_CODEC_TQ, rung);
        }
        if ((codecs & KVF_FORMS_KIVI) != 0 && kvf_rung_bits[rung] == 4) {
            add_kivi(&list, is_v, rung);
        }
    }
    return list.n;
}

bool kvf_form_codecs_parse(const char *text, uint32_t *codecs_out)
{
    uint32_t codecs = 0;

    for (;;) {
        size_t n = strcspn(text, ",");
        uint32_t i = 0;

        while (i < 3 && (strlen(codec_names[i]) != n || strncmp(text, codec_names[i], n) != 0)) {
            i++;
        }
        if (i == 3) {
            return false;
        }
        codecs |= 1U << i;
        if (text[n] == '\0') {
            *codecs_out = codecs;
            return true;
        }
        text += n + 1;
    }
}
