/* SPDX-License-Identifier: Apache-2.0
 *
 * random.c: the kernel's random bytes, and a seeded generator.
 */
#include "base/random.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static void system_fill(void *arg, void *out, size_t bytes)
{
    unsigned char *to = out;

    (void)arg;
    while (bytes > 0) {
        ssize_t got = getrandom(to, bytes, 0);

        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            abort(); /* keys and nonces from anything else would be worse than no daemon */
        }
        to += got;
        bytes -= (size_t)got;
    }
}

const struct kvf_random_ops kvf_random_system = {.fill = system_fill};

/* splitmix64 spreads a small seed over the whole state, which must not be all zero. */
void kvf_random_seeded_init(struct kvf_random_seeded *random, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        uint64_t z = seed += 0x9e3779b97f4a7c15ull;

        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        random->state[i] = z ^ (z >> 31);
    }
}

static uint64_t rotate_left(uint64_t value, int bits)
{
    return (value << bits) | (value >> (64 - bits));
}

uint64_t kvf_random_seeded_next(struct kvf_random_seeded *random)
{
    uint64_t *s = random->state;
    uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

static void seeded_fill(void *arg, void *out, size_t bytes)
{
    unsigned char *to = out;

    while (bytes > 0) {
        uint64_t value = kvf_random_seeded_next(arg);
        size_t piece_bytes = bytes < sizeof(value) ? bytes : sizeof(value);

        memcpy(to, &value, piece_bytes);
        to += piece_bytes;
        bytes -= piece_bytes;
    }
}

const struct kvf_random_ops kvf_random_seeded_ops = {.fill = seeded_fill};
