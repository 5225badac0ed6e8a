/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.c: run a fuzz target as an ordinary test: every file of a corpus as it is, and a number of
 * changed copies of each (replay FOLDER ROUNDS).
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "tests/support/support.h"

/* Change a few bytes, lengthen or shorten, the way that parsers trip over. */
static size_t change(uint8_t *data, size_t bytes, size_t room, struct kvf_random_seeded *random)
{
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    uint64_t r = kvf_random_seeded_next(random);

    for (uint64_t i = 0; i < 1 + r % 4 && bytes > 0; i++) {
        uint64_t where = kvf_random_seeded_next(random);
        uint8_t *byte = &data[where % bytes];

        *byte = (where >> 32) % 2 != 0 ? values[(where >> 40) % sizeof(values)]
                                       : (uint8_t)(*byte ^ 1u << (where >> 40) % 8);
    }
    if ((r >> 32) % 16 == 0) {
        bytes = (r >> 40) % (bytes + 1);
    } else if ((r >> 32) % 16 == 1 && bytes < room) {
        data[bytes++] = (uint8_t)(r >> 40);
    }
    return bytes;
}

static void replay(const char *path, unsigned long rounds, struct kvf_random_seeded *random)
{
    size_t bytes = 0;
    char *content = kvf_test_file_read(path, &bytes);
    size_t room = bytes + 16;
    uint8_t *copy = malloc(room);

    if (content == NULL || copy == NULL) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(1);
    }
    /* an allocation of exactly its size each, so that AddressSanitizer sees the first byte too
     * far */
    for (unsigned long i = 0; i <= rounds; i++) {
        size_t n = bytes;
        uint8_t *exact;

        memcpy(copy, content, bytes);
        for (unsigned long k = 0; i > 0 && k < 1 + i % 3; k++) {
            n = change(copy, n, room, random);
        }
        exact = malloc(n + (n == 0));
        if (exact == NULL) {
            exit(1);
        }
        memcpy(exact, copy, n);
        LLVMFuzzerTestOneInput(exact, n);
        free(exact);
    }
    free(copy);
    free(content);
}

int main(int argc, char **argv)
{
    struct kvf_random_seeded random;
    unsigned long files = 0;
    struct dirent *entry;
    char path[KVF_TEST_PATH_BYTES * 2];
    DIR *folder;

    if (argc != 3) {
        fprintf(stderr, "usage: %s FOLDER ROUNDS\n", argv[0]);
        return 2;
    }
    kvf_random_seeded_init(&random, kvf_test_seed());
    folder = opendir(argv[1]);
    if (folder == NULL) {
        fprintf(stderr, "cannot open %s\n", argv[1]);
        return 1;
    }
    while ((entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] != '.') {
            snprintf(path, sizeof(path), "%s/%s", argv[1], entry->d_name);
            replay(path, strtoul(argv[2], NULL, 10), &random);
            files++;
        }
    }
    closedir(folder);
    printf("%lu files\n", files);
    return files > 0 ? 0 : 1;
}
