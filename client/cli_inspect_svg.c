/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_inspect_svg.c: the figures of kvferry inspect as heat maps: a panel a figure, a row a layer,
 * a column a head, dark is small. Each cell says its value to who points at it.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "client/cli_inspect.h"

enum {
    PANELS = 8,
    PANELS_A_ROW = 4,
    CELL_HEIGHT = 9,
    PANEL_WIDTH = 210,
    MAP_WIDTH = 150,
    MARGIN = 34,
    HEADING = 40,
};

static double value_of(const struct inspect_head *head, int panel)
{
    switch (panel) {
    case 0:
        return head->k_kurtosis;
    case 1:
        return head->k_kurtosis_rotated;
    case 2:
        return head->k_norm / fmax(head->v_norm, 1e-12);
    case 3:
        return kvf_error_centred(&head->k);
    case 4:
        return kvf_error_relative(&head->v);
    case 5:
        return head->noise.p99;
    case 6:
        return head->k_bits;
    default:
        return head->v_bits;
    }
}

static const char *const panel_names[PANELS] = {
    "kurtosis of K", "K after rotation", "norm K / norm V", "error of K",
    "error of V",    "logit noise, p99", "bits for K",      "bits for V",
};

/* From dark blue over green to yellow; share is 0 to 1. */
static void color(double share, unsigned rgb_out[3])
{
    static const double stops[5][3] = {
        {68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37},
    };
    double at = fmin(fmax(share, 0), 1) * 4;
    int stop = at >= 4 ? 3 : (int)at;

    for (int i = 0; i < 3; i++) {
        rgb_out[i] = (unsigned)lround(stops[stop][i] +
                                      (at - stop) * (stops[stop + 1][i] - stops[stop][i]));
    }
}

static void draw_panel(FILE *out, const struct inspect_head *heads, uint32_t n_layers,
                       uint32_t n_heads, int panel)
{
    double x = 20 + panel % PANELS_A_ROW * (double)PANEL_WIDTH;
    double y = HEADING + panel / PANELS_A_ROW * (double)(n_layers * CELL_HEIGHT + 2 * MARGIN) +
               MARGIN;
    double width = (double)MAP_WIDTH / n_heads;
    double low = INFINITY;
    double high = -INFINITY;

    for (uint32_t i = 0; i < n_layers * n_heads; i++) {
        low = fmin(low, value_of(&heads[i], panel));
        high = fmax(high, value_of(&heads[i], panel));
    }
    fprintf(out, "<text x=\"%.0f\" y=\"%.0f\">%s</text>\n", x + 24, y - 6, panel_names[panel]);
    for (uint32_t i = 0; i < n_layers * n_heads; i++) {
        double value = value_of(&heads[i], panel);
        /* figures go over decades: by their logarithms */
        double share = high > low && low > 0 ? log(value / low) / log(high / low) : 0;
        unsigned rgb[3];

        color(share, rgb);
        fprintf(out,
                "<rect x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%d\" "
                "fill=\"#%02x%02x%02x\"><title>layer %u, head %u: %.4g</title></rect>\n",
                x + 24 + i % n_heads * width, y + i / n_heads * (double)CELL_HEIGHT, width,
                CELL_HEIGHT, rgb[0], rgb[1], rgb[2], i / n_heads, i % n_heads, value);
    }
    for (uint32_t layer = 0; layer<n_layers; layer += n_layers> 16 ? 8 : 4) {
        fprintf(out, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">%u</text>\n", x + 20,
                y + (layer + 1) * (double)CELL_HEIGHT - 1, layer);
    }
    fprintf(out, "<text x=\"%.0f\" y=\"%.0f\">%.3g to %.3g</text>\n", x + 24,
            y + n_layers * (double)CELL_HEIGHT + 13, low, high);
}

int cli_inspect_draw(const char *path, const struct inspect_head *heads, uint32_t n_layers,
                     uint32_t n_heads, const char *title)
{
    FILE *out = fopen(path, "we");
    uint32_t rows = (PANELS + PANELS_A_ROW - 1) / PANELS_A_ROW;
    int error;

    if (out == NULL) {
        return -1;
    }
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%u\" "
            "font-family=\"sans-serif\" font-size=\"11\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"20\" y=\"24\" font-size=\"14\">",
            40 + PANELS_A_ROW * PANEL_WIDTH,
            HEADING + rows * (n_layers * CELL_HEIGHT + 2 * MARGIN));
    for (const char *at = title; *at != '\0'; at++) {
        /* names of folders may have anything in them */
        fputs(*at == '<' ? "&lt;" : *at == '&' ? "&amp;" : (char[]){*at, '\0'}, out);
    }
    fprintf(out, "</text>\n");
    for (int panel = 0; panel < PANELS; panel++) {
        draw_panel(out, heads, n_layers, n_heads, panel);
    }
    fprintf(out, "</svg>\n");
    error = ferror(out) != 0 ? EIO : 0;
    if (fclose(out) != 0) {
        return -1;
    }
    errno = error;
    return error != 0 ? -1 : 0;
}
