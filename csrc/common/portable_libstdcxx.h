// Keeps modules loadable with the libstdc++ of manylinux_2_34: any of them may become a wheel.
#pragma once

#include <version>

#ifdef __GLIBCXX__
// GCC 12 gave this function a second version that differs only in `noexcept`. Bound to the first
// version, the module also loads with the libstdc++ of GCC 11, which is what manylinux_2_34 allows.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
