/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_names.h: the words of a profile's file, for profile_file.c and profile_print.c. Each list
 * is in the order of what it names and NULL-terminated.
 */
#ifndef KVF_CODEC_PROFILE_NAMES_H
#define KVF_CODEC_PROFILE_NAMES_H

extern const char *const kvf_profile_codec_names[];  /* from KVF_CODEC_RAW on */
extern const char *const kvf_profile_center_names[]; /* none, KVF_TENSOR_CENTER, _CENTER_PROFILE */
extern const char *const kvf_profile_clip_names[];   /* enum kvf_profile_clip */
extern const char *const kvf_profile_scale_names[];  /* KVF_TENSOR_SCALE_..., in units of 16 */
extern const char *const kvf_profile_rope_names[];   /* enum kvf_rope_state */

#endif /* KVF_CODEC_PROFILE_NAMES_H */
