/* SPDX-License-Identifier: Apache-2.0
 *
 * config_internal.h: what the parts of the configuration share with each other only.
 */
#ifndef KVF_AGENT_CONFIG_INTERNAL_H
#define KVF_AGENT_CONFIG_INTERNAL_H

#include "agent/config.h"

/* An option that is a list of maps. */
struct kvf_config_list {
    const char *name;
    const struct kvf_config_option *options;
    unsigned n_options;
    uint32_t max;
    size_t offset, member_bytes, count_offset; /* in struct kvf_config */
    size_t line_offset, lines_offset;          /* in the member */
};

#define KVF_CONFIG_LISTS 2
extern const struct kvf_config_list kvf_config_lists[KVF_CONFIG_LISTS];

/* NULL: no list of this name. */
const struct kvf_config_list *kvf_config_list_find(const char *name);

/* A member that exists. */
void *kvf_config_list_at(struct kvf_config *config, const struct kvf_config_list *list,
                         uint32_t index);

/* A new member with defaults, NULL if the list is full. */
void *kvf_config_list_append(struct kvf_config *config, const struct kvf_config_list *list,
                             uint32_t line);

/* Take one value; base is the config or the member. why_out gets "what; cure". KVF_OK;
 * KVF_ERR_CONFIG. */
int kvf_config_option_parse(const struct kvf_config_option *option, const char *text, void *base,
                            char *why_out, size_t why_bytes);

/* "section.key" or "key". */
void kvf_config_option_name(const struct kvf_config_option *option, char *out, size_t bytes);

/* A large store needs a write budget. Once more when a device's size is known. */
int kvf_config_check_write_budget(const struct kvf_config *config, uint32_t index,
                                  struct kvf_config_error *error);

/* Peers need a key that they share, and an address that strangers do not reach. */
int kvf_config_check_peers(const struct kvf_config *config, struct kvf_config_error *error);

/* A member's error that begins "command line: nvme.bytes" names the member after this: there is no
 * line to find it by. Others stay as they are. */
void kvf_config_name_member(struct kvf_config_error *error, const char *list, uint32_t index);

/* The candidate that is most like a name. */
struct kvf_config_nearest {
    const char *name;
    const char *best;
    unsigned distance; /* begin with UINT32_MAX */
};
void kvf_config_nearest_offer(struct kvf_config_nearest *nearest, const char *candidate);
void kvf_config_nearest_cure(const struct kvf_config_nearest *nearest, char *out, size_t bytes);

#endif /* KVF_AGENT_CONFIG_INTERNAL_H */
