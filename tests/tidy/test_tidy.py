#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each rule of tidy.py finds what it is for, and lets the right form pass."""
import unittest

import tidy

GOOD_C = """/* SPDX-License-Identifier: Apache-2.0
 *
 * good.c: shows a file with nothing to mend.
 */
#include "base/log.h"
#include "kvferry.h"

#include <stdio.h>

static const char text[] = "strcpy(a, b); // and a very odd string";

int good(void)
{
    return text[0]; /* sprintf is named here only */
}
"""


def found(path, text):
    """The rules that fire on one file, as sorted names."""
    return sorted({finding[0] for finding in tidy.findings([tidy.Source(path, text)])})


def body(line):
    return GOOD_C.replace("    return text[0];", "    " + line + "\n    return text[0];")


class Rules(unittest.TestCase):
    def fires(self, rule, path, text):
        self.assertEqual(found(path, text), [rule])

    def passes(self, path, text):
        self.assertEqual(found(path, text), [])

    def test_good_file(self):
        self.passes("codec/good.c", GOOD_C)

    def test_function_length(self):
        lines = "\n".join(["    x++;"] * 69)
        self.passes("base/a.c", GOOD_C.replace("    return", lines + "\n    return"))
        text = GOOD_C.replace("    return", lines + "\n    x--;\n    return")
        self.fires("function_length", "base/a.c", text)
        names = [finding[4] for finding in tidy.findings([tidy.Source("base/a.c", text)])]
        self.assertEqual(names, ["good"])

    def test_function_name_with_attribute(self):
        lines = "\n".join(["    x++;"] * 71)
        text = GOOD_C.replace("int good(void)", "__global__ void __launch_bounds__(256) k(int a,\n"
                              "    int b)").replace("    return", lines + "\n    return")
        names = [finding[4] for finding in tidy.findings([tidy.Source("codec/a.cu", text)])]
        self.assertEqual(names, ["k"])

    def test_line_length(self):
        self.passes("base/a.c", GOOD_C + "/*" + "x" * 96 + "*/\n")
        self.fires("line_length", "base/a.c", GOOD_C + "/*" + "x" * 97 + "*/\n")

    def test_file_length(self):
        count = tidy.FILE_LINES_MAX - GOOD_C.count("\n")
        self.passes("base/a.c", GOOD_C + "\n" * count)
        self.fires("file_length", "base/a.c", GOOD_C + "\n" * (count + 1))

    def test_whitespace(self):
        self.fires("whitespace", "base/a.c", body("int x; "))
        self.fires("whitespace", "base/a.c", body("\tint x;"))
        self.fires("whitespace", "base/a.c", GOOD_C.rstrip("\n"))
        self.passes("docs/a.md", "two blanks break a line  \n")

    def test_spdx(self):
        self.fires("spdx", "base/a.c", GOOD_C.replace("SPDX-License-Identifier: Apache-2.0", "x"))
        self.passes("a/b.py", "#!/usr/bin/env python3\n# SPDX-License-Identifier: Apache-2.0\n")
        self.fires("spdx", "a/b.py", "#!/usr/bin/env python3\nimport os\n")
        self.fires("spdx", "a/CMakeLists.txt", "add_library(x x.c)\n")

    def test_purpose(self):
        self.fires("purpose", "base/a.c", "/* SPDX-License-Identifier: Apache-2.0 */\nint x;\n")
        self.fires("purpose", "base/a.c", "/* SPDX-License-Identifier: Apache-2.0\n *\n"
                   " * a.c: see a.h.\n */\nint x; /* a comment of more than four words */\n")
        self.passes("base/a.c", "/* SPDX-License-Identifier: Apache-2.0 */\n\n"
                    "/* a.c: what this file is for. */\nint x;\n")

    def test_includes(self):
        for path, target in [("base/a.c", "codec/codec.h"), ("codec/a.c", "tiers/tier.h"),
                             ("client/a.c", "agent/loop.h"), ("codec/a.c", "transport/proto.h"),
                             ("connectors/a.c", "base/log.h"), ("base/a.c", "log.h"),
                             ("tests/a.c", "nowhere/a.h"), ("tiers/a.c", "tests/support/a.h")]:
            self.fires("includes", path, GOOD_C.replace('"base/log.h"', f'"{target}"')
                       .replace('"kvferry.h"', "<math.h>"))
        for path, target in [("tiers/a.c", "codec/codec.h"), ("agent/a.c", "tiers/tier.h"),
                             ("client/a.c", "gpu/gpu.h"), ("tests/a.c", "agent/index.h"),
                             ("connectors/a.c", "kvferry.h")]:
            self.passes(path, GOOD_C.replace('"base/log.h"', f'"{target}"'))

    def test_banned_calls(self):
        for call in ["strcpy(a, b);", "x = atoi (s);", "sprintf(a, b);", "p = alloca(9);"]:
            self.fires("banned_calls", "base/a.c", body(call))
            self.fires("banned_calls", "tests/a.c", body(call))
        for call in ["fork();", "exit(1);", "longjmp(a, 1);"]:
            self.fires("banned_calls", "agent/loop.c", body(call))
            self.passes("tests/a.c", body(call))
        self.passes("agent/main.c", body("exit(1);"))
        self.passes("client/examples/01_put_get.c", body("exit(1);"))
        for call in ["kvf_fork();", "clock->random(x);", "my.rand(y);", "pool_exit(1);"]:
            self.passes("agent/loop.c", body(call))

    def test_cloexec(self):
        self.fires("cloexec", "tiers/a.c", body("fd = open(path, O_RDWR);"))
        self.fires("cloexec", "tiers/a.c", body("fd = accept(a, b, c);"))
        self.passes("tiers/a.c", body("fd = open(path,\n        O_RDWR | O_CLOEXEC);"))
        self.passes("tiers/a.c", body("ops->open(path, O_RDWR);"))
        self.passes("tests/a.c", body("fd = open(path, O_RDWR);"))

    def test_machine_paths(self):
        for path in ["/wo" + "rk/main", "/ro" + "ot/x", "/ho" + "me/me/x"]:
            self.fires("machine_paths", "docs/a.md", f"See {path}.\n")
        self.passes("docs/a.md", "Work on /tmp/kvferry or /var/lib/kvferry.\n")

    def test_leftovers(self):
        self.fires("leftovers", "base/a.c", body("/* TO" + "DO: later */"))

    def test_comment_form(self):
        self.fires("comment_form", "base/a.c", body("x = 1; // why"))
        self.passes("base/a.c", body("/* see https://example.org/x */"))


class Tree(unittest.TestCase):
    def rules(self, files):
        sources = [tidy.Source(path, text) for path, text in files.items()]
        return [finding[0] for finding in tidy.tree_rules(sources)]

    def test_status_names(self):
        header = "enum kvf_status {\n    KVF_OK = 0,\n    KVF_ERR_IO = -64, /* x */\n};\n"
        good = '{KVF_OK, "ok"}, {KVF_ERR_IO, "io"}'
        for text, expected in [(good, []), ('{KVF_OK, "ok"}', ["status_names"])]:
            files = {"client/include/kvferry.h": header, "base/status.c": text}
            self.assertEqual(self.rules(files), expected)

    def test_packages(self):
        make = "NEEDS := \\\n    liba-dev:module=a\n"
        self.assertEqual(self.rules({"Makefile": make,
                                     "CMakeLists.txt": 'kvf_require(A "a" liba-dev)'}), [])
        self.assertEqual(self.rules({"Makefile": make,
                                     "CMakeLists.txt": 'kvf_require(B "b" libb-dev)'}),
                         ["packages"])

    def test_failpoints(self):
        table = "KVF_FAILPOINT_ENTRY(nvme, seal)\n"
        for text, expected in [("x = KVF_FAILPOINT(nvme_seal);", []),
                               ("x = KVF_FAILPOINT(nvme_footer); /* KVF_FAILPOINT(nvme_seal) */",
                                ["failpoints"])]:
            self.assertEqual(self.rules({"base/failpoint.def": table, "tiers/a.c": text}), expected)

    def test_basenames(self):
        self.assertEqual(self.rules({"base/a.c": GOOD_C, "codec/a.c": GOOD_C}), ["basenames"])
        self.assertEqual(self.rules({"base/a.c": GOOD_C, "tests/a.c": GOOD_C}), [])


class Exceptions(unittest.TestCase):
    def test_excuse_and_expire(self):
        sources = [tidy.Source("base/a.c", body("gets(x);"))]
        self.assertEqual(len(tidy.check(sources, set())), 1)
        self.assertEqual(tidy.check(sources, {("banned_calls", "base/a.c", "gets")}), [])
        clean = [tidy.Source("base/a.c", GOOD_C)]
        self.assertIn("no longer needed",
                      tidy.check(clean, {("banned_calls", "base/a.c", "gets")})[0])


if __name__ == "__main__":
    unittest.main()
