// What the AVX-512 instructions of kernels/salr/native.cpp compute, lane by lane, by Intel's definitions: for CPUs without them.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
struct E512 { float f[16]; };
struct E512i { uint32_t u[16]; };
struct E512bh {
  uint16_t h[32];
  E512bh(const E512i& v) { memcpy(h, v.u, 64); }
};
static inline float e_bf16(uint16_t v) { uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
static inline E512 e_loadu_ps(const void* p) { E512 r; memcpy(&r, p, 64); return r; }
static inline void e_storeu_ps(void* p, E512 v) { memcpy(p, &v, 64); }
static inline E512i e_loadu_si512(const void* p) { E512i r; memcpy(&r, p, 64); return r; }
static inline E512 e_set1_ps(float v) { E512 r; for (float& f : r.f) f = v; return r; }
static inline E512 e_setzero_ps() { return e_set1_ps(0); }
static inline E512i e_set1_epi32(int v) { E512i r; for (uint32_t& u : r.u) u = (uint32_t)v; return r; }
static inline E512 e_fmadd_ps(E512 a, E512 b, E512 c) { for (int i = 0; i < 16; i++) c.f[i] += a.f[i] * b.f[i]; return c; }
static inline float e_reduce_add_ps(E512 v) { float t = 0; for (float f : v.f) t += f; return t; }
static inline E512 e_maskz_expand_ps(uint16_t m, E512 v) {
  E512 r = e_setzero_ps();
  for (int i = 0, c = 0; i < 16; i++) if (m >> i & 1) r.f[i] = v.f[c++];
  return r;
}
static inline E512i e_maskz_expand_epi16(uint32_t m, E512i v) {
  uint16_t in[32], out[32] = {0};
  memcpy(in, v.u, 64);
  for (int i = 0, c = 0; i < 32; i++) if (m >> i & 1) out[i] = in[c++];
  memcpy(v.u, out, 64);
  return v;
}
static inline __attribute__((target("avx2"))) __m256i e256_maskz_expand_epi16(uint16_t m, __m256i v) {
  uint16_t in[16], out[16] = {0};
  memcpy(in, &v, 32);
  for (int i = 0, c = 0; i < 16; i++) if (m >> i & 1) out[i] = in[c++];
  memcpy(&v, out, 32);
  return v;
}
static inline __attribute__((target("avx2"))) E512i e_cvtepu16_epi32(__m256i v) {
  uint16_t in[16]; E512i r;
  memcpy(in, &v, 32);
  for (int i = 0; i < 16; i++) r.u[i] = in[i];
  return r;
}
static inline E512i e_slli_epi32(E512i v, int n) { for (uint32_t& u : v.u) u <<= n; return v; }
static inline E512 e_castsi512_ps(E512i v) { E512 r; memcpy(&r, v.u, 64); return r; }
static inline __attribute__((target("avx2,f16c"))) E512 e_cvtph_ps(__m256i v) {
  uint16_t in[16]; E512 r;
  memcpy(in, &v, 32);
  for (int i = 0; i < 16; i++) r.f[i] = _cvtsh_ss(in[i]);
  return r;
}
static inline E512 e_dpbf16_ps(E512 a, E512bh x, E512bh y) {
  for (int i = 0; i < 16; i++) {
    a.f[i] += e_bf16(x.h[2 * i + 1]) * e_bf16(y.h[2 * i + 1]);
    a.f[i] += e_bf16(x.h[2 * i]) * e_bf16(y.h[2 * i]);
  }
  return a;
}
#define __m512 E512
#define __m512i E512i
#define __m512bh E512bh
#define _mm512_loadu_ps e_loadu_ps
#define _mm512_storeu_ps e_storeu_ps
#define _mm512_loadu_si512 e_loadu_si512
#define _mm512_set1_ps e_set1_ps
#define _mm512_setzero_ps e_setzero_ps
#define _mm512_set1_epi32 e_set1_epi32
#define _mm512_fmadd_ps e_fmadd_ps
#define _mm512_reduce_add_ps e_reduce_add_ps
#define _mm512_maskz_expand_ps e_maskz_expand_ps
#define _mm512_maskz_expand_epi16 e_maskz_expand_epi16
#define _mm256_maskz_expand_epi16 e256_maskz_expand_epi16
#define _mm512_cvtepu16_epi32 e_cvtepu16_epi32
#define _mm512_slli_epi32 e_slli_epi32
#define _mm512_castsi512_ps e_castsi512_ps
#define _mm512_cvtph_ps e_cvtph_ps
#define _mm512_dpbf16_ps e_dpbf16_ps
