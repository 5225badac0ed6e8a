/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_peers.c: kvferry peers: linked daemons of other nodes.
 */
#include "client/cli.h"

#include <inttypes.h>
#include <stdio.h>

static void print_peer(const json_t *row)
{
    bool is_asked = json_is_true(json_object_get(row, "asked"));
    char fetched[32];
    char served[32];

    printf("%-22s %-20.20s %-9s %10" PRIu64 " %8" PRIu64 " %10s %8" PRIu64 " %8" PRIu64
           " %10s %8" PRIu64 "\n",
           is_asked ? cli_string(row, "address") : "asks us", cli_string(row, "name"),
           cli_string(row, "state"), cli_number(row, "blocks"), cli_number(row, "fetched_blocks"),
           cli_bytes_text(cli_number(row, "fetched_bytes"), fetched, sizeof(fetched)),
           cli_number(row, "failed_blocks"), cli_number(row, "served_blocks"),
           cli_bytes_text(cli_number(row, "served_bytes"), served, sizeof(served)),
           cli_number(row, "linked_s"));
}

int cli_peers(const struct cli *cli)
{
    json_t *answer;
    const json_t *row;
    size_t i;
    int code = cli_http(cli, "GET", "/v1/peers", &answer);

    if (code != CLI_OK) {
        return code;
    }
    if (cli->is_json) {
        cli_print_json(answer);
        return CLI_OK;
    }
    printf("%-22s %-20s %-9s %10s %8s %10s %8s %8s %10s %8s\n", "address", "name", "state",
           "blocks", "fetched", "", "failed", "served", "", "for s");
    json_array_foreach(json_object_get(answer, "peers"), i, row)
    {
        print_peer(row);
    }
    json_decref(answer);
    return CLI_OK;
}
