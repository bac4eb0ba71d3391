/* SPDX-License-Identifier: Apache-2.0 */
int which_malloc(void) { return 2; }
