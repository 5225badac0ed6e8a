/* SPDX-License-Identifier: Apache-2.0
 *
 * usage.c: help made from config.def, so that it cannot fall behind.
 */
#include "agent/usage.h"

#include <inttypes.h>
#include <string.h>

#include "agent/config.h"
#include "agent/config_internal.h"

/* Column where the text of an option begins, and where it is wrapped. */
#define TEXT_COLUMN 8
#define WRAP_COLUMN 80

static void print_wrapped(FILE *out, const char *text)
{
    size_t column = TEXT_COLUMN;

    fprintf(out, "%*s", TEXT_COLUMN, "");
    while (*text != '\0') {
        size_t length = strcspn(text, " ");

        if (column + length > WRAP_COLUMN && column > TEXT_COLUMN) {
            fprintf(out, "\n%*s", TEXT_COLUMN, "");
            column = TEXT_COLUMN;
        }
        fprintf(out, "%s%.*s", column > TEXT_COLUMN ? " " : "", (int)length, text);
        column += length + 1;
        text += length;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static void print_option(FILE *out, const char *name, const struct kvf_config_option *option)
{
    fprintf(out, "    %s (%s%s%s)\n", name, kvf_config_type_name(option->type),
            option->default_text[0] != '\0' ? ", default " : "", option->default_text);
    print_wrapped(out, option->text);
}

void kvf_usage_print_help(FILE *out)
{
    char name[64];

    fputs(
        "usage: kvferryd [--config FILE | --dir DIR] [--set OPTION=VALUE]... [ACTION]\n"
        "\n"
        "Keeps KV cache blocks of serving engines in memory and on drives.\n"
        "\n"
        "    --config FILE      read options from a YAML file\n"
        "    --dir DIR          no file: sockets and a store of 2 GiB in this folder. Without\n"
        "                       --config and --dir: /run/kvferry and /var/lib/kvferry, or a\n"
        "                       folder of this user\n"
        "    --set OPTION=VALUE set one option, after the file; lists as nvme.0.path=FILE\n"
        "\n"
        "actions instead of serving:\n"
        "    --check            print the memory and drives this would take; exit 0 if they fit\n"
        "    --format PATH      make PATH (a file or a device) an empty store, whatever it holds\n"
        "      --bytes SIZE     its size, if the configuration does not have the path\n"
        "      --yes            do not ask\n"
        "    --print-config     print the options in force as YAML\n"
        "    --print-options    print the table of options, tab-separated\n"
        "    --help, --version\n"
        "\n"
        "exit codes: 0 drained or done, 1 failed while running, 2 usage or configuration\n"
        "\n"
        "options:\n",
        out);
    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        const struct kvf_config_list *list = &kvf_config_lists[i];

        for (unsigned k = 0; k < list->n_options; k++) {
            snprintf(name, sizeof(name), "%s.N.%s", list->name, list->options[k].key);
            print_option(out, name, &list->options[k]);
        }
    }
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        kvf_config_option_name(&kvf_config_options[i], name, sizeof(name));
        print_option(out, name, &kvf_config_options[i]);
    }
}

static void print_row(FILE *out, const char *name, const struct kvf_config_option *option)
{
    int words = option->type == KVF_CONFIG_ENUM ? (int)strcspn(option->text, ":") : 0;
    const char *text = option->text + words + (words > 0 ? 2 : 0);

    fprintf(out, "%s\t%s\t%s\t%" PRIu64 "\t%" PRIu64 "\t%.*s\t%s\n", name,
            kvf_config_type_name(option->type), option->default_text, option->min, option->max,
            words, option->text, text);
}

void kvf_usage_print_options(FILE *out)
{
    char name[64];

    for (unsigned i = 0; i < KVF_CONFIG_LISTS; i++) {
        const struct kvf_config_list *list = &kvf_config_lists[i];

        for (unsigned k = 0; k < list->n_options; k++) {
            snprintf(name, sizeof(name), "%s[].%s", list->name, list->options[k].key);
            print_row(out, name, &list->options[k]);
        }
    }
    for (unsigned i = 0; i < KVF_CONFIG_OPTIONS; i++) {
        kvf_config_option_name(&kvf_config_options[i], name, sizeof(name));
        print_row(out, name, &kvf_config_options[i]);
    }
}
