# SPDX-License-Identifier: Apache-2.0
#
# check_install.py BUILD CMAKE CC PKG_CONFIG: what an installation gives to those who link it. A
# program that uses both libraries is built by what pkg-config says, once against the shared
# libraries and once against the archives, and runs: without the libraries in the second case.
import os
import subprocess
import sys
import tempfile

PROGRAM = r"""
#include <kvferry.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    struct kvf_gpu_event event;
    struct kvf_client *client = NULL;
    struct kvf_options options;
    struct kvf_gpu *gpu = NULL;
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options)};
    uint32_t n;

    kvf_options_init(&options);
    options.socket_path = "/nonexistent/kvferryd.sock";
    if (kvf_open(&options, &client) == KVF_OK || client != NULL) {
        return 1;
    }
    if (kvf_gpu_open(client, &gpu_options, &gpu) != KVF_ERR_INVALID ||
        kvf_gpu_poll(gpu, &event, 1, 0, &n) != KVF_ERR_UNSUPPORTED) {
        return 2;
    }
    puts(kvf_version());
    return 0;
}
"""


def run(*command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main():
    build, cmake, cc, pkg_config = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "prefix")
        run(cmake, "--install", build, "--prefix", prefix)
        configs = [path for path, _, names in os.walk(prefix) if "libkvferry_gpu.pc" in names]
        if len(configs) != 1:
            sys.exit(f"libkvferry_gpu.pc is in {configs}")
        source = os.path.join(folder, "consumer.c")
        with open(source, "w", encoding="ascii") as file:
            file.write(PROGRAM)

        def ask(*options):
            return run(pkg_config, *options, "libkvferry_gpu", PKG_CONFIG_PATH=configs[0]).split()

        version = ask("--modversion")
        shared = os.path.join(folder, "shared")
        run(cc, source, "-o", shared, *ask("--cflags", "--libs"))
        libraries = os.path.dirname(configs[0])
        if run(shared, LD_LIBRARY_PATH=libraries).split() != version:
            sys.exit("the shared libraries are of another version than their description")

        archived = os.path.join(folder, "archived")
        archives = [flag.replace("-lkvferry", "-l:libkvferry") + ".a"
                    if flag.startswith("-lkvferry") else flag
                    for flag in ask("--static", "--cflags", "--libs")]
        run(cc, source, "-o", archived, *archives)
        if run(archived, LD_LIBRARY_PATH="").split() != version:
            sys.exit("the archives are of another version than their description")
    print(f"{version[0]}: shared libraries and archives")


if __name__ == "__main__":
    main()
