/* SPDX-License-Identifier: Apache-2.0
 *
 * include_cxx.cc: the public header is C++ as well: strict, without any other include before it.
 */
#include "kvferry.h"

extern "C" int kvf_include_cxx(kvf_client *client)
{
    kvf_info info = {};
    kvf_options options;

    info.struct_bytes = sizeof(info);
    kvf_options_init(&options);
    return kvf_client_info(client, &info) == KVF_OK && options.shard_count == 1 ? KVF_OK
                                                                                : KVF_ERR_INVALID;
}
