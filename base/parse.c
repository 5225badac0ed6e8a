/* SPDX-License-Identifier: Apache-2.0
 *
 * parse.c: a whole number and a unit from a table.
 */
#include "base/parse.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"", 1},
    {"B", 1},
    {"KiB", 1ull << 10},
    {"MiB", 1ull << 20},
    {"GiB", 1ull << 30},
    {"TiB", 1ull << 40},
    {NULL, 0},
};

static const struct unit duration_units[] = {
    {"us", KVF_NS_PER_US},      {"ms", KVF_NS_PER_MS},      {"s", KVF_NS_PER_S},
    {"min", 60 * KVF_NS_PER_S}, {"h", 3600 * KVF_NS_PER_S}, {NULL, 0},
};

/* The digits at the start of text. *end_out is what follows them. */
static int take_digits(const char *text, uint64_t *value_out, const char **end_out, char *error_out,
                       size_t error_bytes)
{
    const char *c = text;
    uint64_t value = 0;

    while (*c >= '0' && *c <= '9') {
        uint64_t digit = (uint64_t)(*c - '0');

        if (value > (UINT64_MAX - digit) / 10) {
            snprintf(error_out, error_bytes, "'%s' is too large", text);
            return KVF_ERR_INVALID;
        }
        value = value * 10 + digit;
        c++;
    }
    if (c == text) {
        snprintf(error_out, error_bytes, "'%s' does not begin with a digit", text);
        return KVF_ERR_INVALID;
    }
    *value_out = value;
    *end_out = c;
    return KVF_OK;
}

int kvf_parse_u64(const char *text, uint64_t *value_out, char *error_out, size_t error_bytes)
{
    const char *end;
    uint64_t value;
    int status = take_digits(text, &value, &end, error_out, error_bytes);

    if (status != KVF_OK) {
        return status;
    }
    if (*end != '\0') {
        snprintf(error_out, error_bytes, "'%s' is not a whole number: '%s' follows it", text, end);
        return KVF_ERR_INVALID;
    }
    *value_out = value;
    return KVF_OK;
}

/* A number and one of the units. zero_is_bare: "0" is right without one. */
static int parse_with_unit(const char *text, const struct unit *units, const char *names,
                           int zero_is_bare, uint64_t *value_out, char *error_out,
                           size_t error_bytes)
{
    const char *end;
    uint64_t value;
    int status = take_digits(text, &value, &end, error_out, error_bytes);

    if (status != KVF_OK) {
        return status;
    }
    if (zero_is_bare && value == 0 && *end == '\0') {
        *value_out = 0;
        return KVF_OK;
    }
    if (*end == ' ' && end[1] != '\0') {
        end++;
    }
    for (const struct unit *unit = units; unit->name != NULL; unit++) {
        if (strcmp(end, unit->name) != 0) {
            continue;
        }
        if (value > UINT64_MAX / unit->factor) {
            snprintf(error_out, error_bytes, "'%s' is too large", text);
            return KVF_ERR_INVALID;
        }
        *value_out = value * unit->factor;
        return KVF_OK;
    }
    if (*end == '\0') {
        snprintf(error_out, error_bytes, "'%s' has no unit: use %s", text, names);
    } else {
        snprintf(error_out, error_bytes, "'%s' has the unknown unit '%s': use %s", text, end,
                 names);
    }
    return KVF_ERR_INVALID;
}

int kvf_parse_size(const char *text, uint64_t *bytes_out, char *error_out, size_t error_bytes)
{
    return parse_with_unit(text, size_units, "B, KiB, MiB, GiB or TiB", 0, bytes_out, error_out,
                           error_bytes);
}

int kvf_parse_duration(const char *text, uint64_t *ns_out, char *error_out, size_t error_bytes)
{
    return parse_with_unit(text, duration_units, "us, ms, s, min or h", 1, ns_out, error_out,
                           error_bytes);
}
