/* SPDX-License-Identifier: Apache-2.0
 *
 * debug.h: the assertion for hot loops.
 *
 * assert() stays on in every build type, so it guards what is cheap beside the work it guards.
 * kvf_debug_assert() is for the rest: checked in Debug builds, and elsewhere compiled (so that it
 * cannot rot) but never evaluated.
 */
#ifndef KVF_BASE_DEBUG_H
#define KVF_BASE_DEBUG_H

#include <assert.h>

#ifdef KVF_DEBUG
#define kvf_debug_assert(condition) assert(condition)
#else
#define kvf_debug_assert(condition) ((void)sizeof(!(condition)))
#endif

#endif /* KVF_BASE_DEBUG_H */
