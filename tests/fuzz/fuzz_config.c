/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_config.c: any bytes as a configuration file. Either it is refused with one line, or what was
 * taken is printed and reads back as the same.
 */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/config.h"
#include "tests/fuzz/fuzz.h"

static char *print_text(const struct kvf_config *config)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    assert(out != NULL);
    kvf_config_print(config, out);
    fclose(out);
    return text;
}

/* Parse and finish; the error is one line exactly if that failed. */
static int take(struct kvf_config *config, const char *text, size_t bytes)
{
    struct kvf_config_error error = {{0}};
    int status;

    kvf_config_init(config);
    status = kvf_config_parse(config, "fuzz.yaml", text, bytes, &error);
    if (status == KVF_OK) {
        status = kvf_config_finish(config, &error);
    }
    assert((status == KVF_OK) == (error.text[0] == '\0'));
    assert(strchr(error.text, '\n') == NULL);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct kvf_config *first = malloc(sizeof(*first));
    struct kvf_config *second = malloc(sizeof(*second));

    assert(first != NULL && second != NULL);
    if (take(first, (const char *)data, bytes) == KVF_OK) {
        char *text = print_text(first);
        int status = take(second, text, strlen(text));
        char *again = print_text(second);

        assert(status == KVF_OK);
        assert(strcmp(text, again) == 0);
        (void)status;
        free(text);
        free(again);
    }
    free(first);
    free(second);
    return 0;
}
