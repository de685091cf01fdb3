// y = x W^T + (x A^T) B^T + bias with W in the bitmap format of encoding.py, on x86 CPUs with AVX2 or AVX-512.
//
// A plain C ABI, loaded with ctypes: no header of torch, numpy or Python. Each function carries the target attribute of
// its instruction set, so one object file serves every CPU and `salr_isa` says at run time what it may call.
//
// Format: rows in groups of 4, columns in words of 64. bits[group][word][row] is a mask whose bit j keeps column
// 64 word + j; `vals` holds the kept values in the same order, and at least 64 more elements, since whole vectors are
// loaded; offs[group] is where a group starts. Both streams are read once, front to back, and x is loaded once per 4 rows.
//
// Expanding 8 values: the mask byte selects a row of a table that tells each lane which of the next values it takes.
//   16-bit values: 16 bytes hold all that one byte can ask for. They are broadcast to both halves of a register, and one
//                  byte shuffle yields 8 floats at once: (0, 0, low, high) is the float whose upper half is a bfloat16.
//   32-bit values: 4 of them hold what half a byte can ask for, so each half of a register is loaded from its own place,
//                  and one byte shuffle expands both halves.
//   AVX-512:       the expand instruction; 7 cycles a vector on Zen 4, where the tables win, so AMD keeps to them.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif
#define API extern "C" __attribute__((visibility("default")))

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512BF16 = 3 };
enum { F32 = 0, BF16 = 1, F16 = 2 };

API int salr_version() { return 1; }

API int salr_isa() {
#if defined(SALR_EMULATED)
  return AVX512BF16;
#elif defined(X86)
  __builtin_cpu_init();
  const bool v2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  if (!v2) return PORTABLE;
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi2");
  return !v4 ? AVX2 : __builtin_cpu_supports("avx512bf16") ? AVX512BF16 : AVX512;
#else
  return PORTABLE;
#endif
}

// Whether the byte tables beat the expand instruction (see above); only asked where both exist.
API int salr_prefers_tables() {
#if defined(X86)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") ? 1 : 0;
#else
  return 0;
#endif
}

// ---- any CPU ---------------------------------------------------------------------------------------------------------
template <class T>
static void decode_plain(const uint64_t* bits, const T* vals, const int64_t* offs, int64_t N, int64_t K, T* out, int threads) {
  const int64_t words = (K + 63) / 64, groups = (N + 3) / 4;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t g = 0; g < groups; g++) {
    const T* p = vals + offs[g];
    for (int64_t i = 0; i < words; i++)
      for (int r = 0; r < 4; r++) {
        uint64_t w = bits[(g * words + i) * 4 + r];
        const int64_t n = 4 * g + r, wide = K - 64 * i < 64 ? K - 64 * i : 64;
        if (n < N) memset(out + n * K + 64 * i, 0, wide * sizeof(T));
        for (; w; w &= w - 1, p++)
          if (n < N) out[n * K + 64 * i + __builtin_ctzll(w)] = *p;
      }
  }
}

#ifdef X86
#define T2 __attribute__((target("avx2,fma,popcnt,bmi,bmi2,f16c")))
#define IN2 inline __attribute__((always_inline)) T2
#ifdef SALR_EMULATED  // tests/unit/avx512_emulated.h stands in for the instructions
#define T5 T2
#define T5B T2
#else
#define T5 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,fma,popcnt,bmi,bmi2,f16c")))
#define T5B __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,fma,popcnt,bmi,bmi2,f16c")))
#endif
#define IN5 inline __attribute__((always_inline)) T5
#define IN5B inline __attribute__((always_inline)) T5B
#define UNROLL _Pragma("GCC unroll 16")

// Byte tables: where[m][j] is the place of lane j among the values that mask m keeps, high bit set where it keeps none.
struct Tables {
  alignas(64) uint8_t wide[256][32];  // 16-bit values to the upper halves of 8 lanes of 32 bits
  alignas(64) uint8_t half[256][16];  // 16-bit values to 8 lanes of 16 bits
  alignas(64) uint32_t lane[256][8];  // 32-bit values to 8 lanes, places counted in each half apart
  Tables() {
    for (int m = 0; m < 256; m++) {
      int c = 0;
      for (int j = 0; j < 8; j++) {
        const bool kept = m >> j & 1;
        const uint8_t low = kept ? 2 * c : 0x80, high = kept ? 2 * c + 1 : 0x80;
        wide[m][4 * j] = wide[m][4 * j + 1] = 0x80;
        wide[m][4 * j + 2] = half[m][2 * j] = low;
        wide[m][4 * j + 3] = half[m][2 * j + 1] = high;
        const int below = j < 4 ? 0 : __builtin_popcount(m & 15);
        lane[m][j] = kept ? 0x03020100u + 0x04040404u * (uint32_t)(c - below) : 0x80808080u;
        c += kept;
      }
    }
  }
};
static const Tables TABLE;

#define BELOW(w, s) ((s) ? __builtin_popcountll((w) & ((1ull << (8 * (s))) - 1)) : 0)
// The mask byte times 4: an index that x86 addressing scales by up to 8 without another shift.
// A rotation: unlike a shift it has a form that leaves its operand, which saves a move.
#define BYTE4(w, s) (((w) >> ((8 * (s) + 62) % 64) | (w) << (64 - (8 * (s) + 62) % 64)) & 0x3fc)

struct Float32 {
  typedef float T;
  enum { BYTES = 4 };
  static IN2 __m256 expand(uint64_t w, int s, const T* p) {
    const uint64_t byte4 = BYTE4(w, s);
    p += BELOW(w, s);
    const __m128i lo = _mm_loadu_si128((const __m128i*)p);
    const __m128i hi = _mm_loadu_si128((const __m128i*)(p + __builtin_popcountll(byte4 & 0x3c)));
    const __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(v, _mm256_load_si256((const __m256i*)((const char*)TABLE.lane + byte4 * 8))));
  }
  static IN2 void store8(T* o, uint64_t w, int s, const T* p) { _mm256_storeu_ps(o, expand(w, s, p)); }
  static IN2 __m256 load8(const T* p) { return _mm256_loadu_ps(p); }
  static inline float get(T v) { return v; }
  static IN2 void put(T* p, float f) { *p = f; }
};
struct Half16 {
  typedef uint16_t T;
  enum { BYTES = 2 };
  static IN2 __m128i shuffled(uint64_t w, int s, const T* p) {
    const __m128i v = _mm_loadu_si128((const __m128i*)(p + BELOW(w, s)));
    return _mm_shuffle_epi8(v, _mm_load_si128((const __m128i*)((const char*)TABLE.half + BYTE4(w, s) * 4)));
  }
  static IN2 void store8(T* o, uint64_t w, int s, const T* p) { _mm_storeu_si128((__m128i*)o, shuffled(w, s, p)); }
};
struct BFloat16 : Half16 {
  static IN2 __m256 expand(uint64_t w, int s, const T* p) {
    const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(p + BELOW(w, s))));
    return _mm256_castsi256_ps(
        _mm256_shuffle_epi8(v, _mm256_load_si256((const __m256i*)((const char*)TABLE.wide + BYTE4(w, s) * 8))));
  }
  static IN2 __m256 load8(const T* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
  static inline float get(T v) { const uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
  static IN2 void put(T* p, float f) {  // to nearest, ties to even; a NaN stays one
    uint32_t u;
    memcpy(&u, &f, 4);
    *p = f != f ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};
struct Float16 : Half16 {
  static IN2 __m256 expand(uint64_t w, int s, const T* p) { return _mm256_cvtph_ps(shuffled(w, s, p)); }
  static IN2 __m256 load8(const T* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static IN2 float get(T v) { return _cvtsh_ss(v); }
  static IN2 void put(T* p, float f) { *p = _cvtss_sh(f, 0); }
};

static IN2 float sum8(__m256 t) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}

template <class D>
static T2 void widen(const typename D::T* x, int64_t M, int64_t K, float* out, int64_t ld) {
  for (int64_t m = 0; m < M; m++) {
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) _mm256_storeu_ps(out + m * ld + k, D::load8(x + m * K + k));
    for (; k < K; k++) out[m * ld + k] = D::get(x[m * K + k]);
    for (; k < ld; k++) out[m * ld + k] = 0;
  }
}

// z[m][j] = a_j . x_m for MB batch rows at once.
template <class D, int MB>
static T2 void dots(const typename D::T* a, const float* x, int64_t ld, int64_t K, float* z, int64_t ldz) {
  constexpr int C = MB == 1 ? 4 : 1;
  __m256 s[MB][C];
  for (int m = 0; m < MB; m++) for (int c = 0; c < C; c++) s[m][c] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 8 * C <= K; k += 8 * C)
    UNROLL for (int c = 0; c < C; c++) {
      const __m256 v = D::load8(a + k + 8 * c);
      UNROLL for (int m = 0; m < MB; m++) s[m][c] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + m * ld + k + 8 * c), s[m][c]);
    }
  for (int m = 0; m < MB; m++) {
    for (int c = 1; c < C; c++) s[m][0] = _mm256_add_ps(s[m][0], s[m][c]);
    float t = sum8(s[m][0]);
    for (int64_t i = k; i < K; i++) t += D::get(a[i]) * x[m * ld + i];
    z[m * ldz] = t;
  }
}

struct Job {  // what one call is about; x and z are float, rows of ldx (a multiple of 64) and R
  const uint64_t* bits; const void* vals; const int64_t* offs;
  const float* x; const uint16_t* xb; const void* bias; const void* A; const void* B; void* y;
  int64_t M, N, K, R, words, ldx; float* z; float* xp; float* scratch; int64_t scratch_floats; int threads;
};

static inline int thread_id() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

template <class D>
static T2 void low_rank(const Job& j) {
  typedef typename D::T T;
  const int64_t blocks = (j.M + 3) / 4;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < j.R * blocks; t++) {
    const int64_t r = t % j.R, m = t / j.R * 4;
    const T* a = (const T*)j.A + r * j.K;
    const float* x = j.x + m * j.ldx;
    float* z = j.z + m * j.R + r;
    switch (j.M - m < 4 ? j.M - m : 4) {
      case 1: dots<D, 1>(a, x, j.ldx, j.K, z, j.R); break;
      case 2: dots<D, 2>(a, x, j.ldx, j.K, z, j.R); break;
      case 3: dots<D, 3>(a, x, j.ldx, j.K, z, j.R); break;
      default: dots<D, 4>(a, x, j.ldx, j.K, z, j.R);
    }
  }
}

// What the sparse part lacks, and the store: columns `done`.. of the adapters, the bias.
template <class D>
static IN2 void finish(const Job& j, int64_t m, int64_t n, float sum, int64_t done) {
  typedef typename D::T T;
  if (done < j.R) {
    float t;
    dots<D, 1>((const T*)j.B + n * j.R + done, j.z + m * j.R + done, j.R, j.R - done, &t, 1);
    sum += t;
  }
  if (j.bias) sum += D::get(((const T*)j.bias)[n]);
  D::put((T*)j.y + m * j.N + n, sum);
}

// ---- few rows of x: decode in registers --------------------------------------------------------------------------------
#define PREFETCH(p, bytes) _mm_prefetch((const char*)(p) + (bytes), _MM_HINT_T0)
enum { AHEAD = 2048, CHUNK = 16 };  // bytes of values fetched ahead; groups that a thread takes at a time

template <class D, int MB>
static IN2 void group_avx2(const Job& j, int64_t g, int64_t m0, float out[4][MB]) {
  typedef typename D::T T;
  const uint64_t* b = j.bits + g * j.words * 4;
  const T* p = (const T*)j.vals + j.offs[g];
  const float* x = j.x + m0 * j.ldx;
  __m256 acc[4][MB];
  UNROLL for (int r = 0; r < 4; r++) UNROLL for (int m = 0; m < MB; m++) acc[r][m] = _mm256_setzero_ps();
  for (int64_t i = 0; i < 4 * j.R * D::BYTES; i += 64) PREFETCH((const T*)j.B + 4 * g * j.R, i);
  for (int64_t i = 0; i < j.words; i++, b += 4) {
    uint64_t w[4];
    const T* q[4];
    UNROLL for (int r = 0; r < 4; r++) {
      w[r] = b[r];
      q[r] = r ? q[r - 1] + __builtin_popcountll(w[r - 1]) : p;
      PREFETCH(p + 32 * r, AHEAD);  // half of 64 values a row: what is read, at the usual sparsity
      if (D::BYTES == 4) PREFETCH(p + 32 * r + 16, AHEAD);
    }
    if (i % 2 == 0) PREFETCH(b, 1024);
    p = q[3] + __builtin_popcountll(w[3]);
    UNROLL for (int s = 0; s < 8; s++) {
      __m256 xv[MB];
      UNROLL for (int m = 0; m < MB; m++) xv[m] = _mm256_loadu_ps(x + m * j.ldx + 64 * i + 8 * s);
      UNROLL for (int r = 0; r < 4; r++) {
        const __m256 e = D::expand(w[r], s, q[r]);
        UNROLL for (int m = 0; m < MB; m++) acc[r][m] = _mm256_fmadd_ps(e, xv[m], acc[r][m]);
      }
    }
  }
  // The adapters join the same sums, so that they cost no reduction of their own.
  for (int64_t k = 0; k + 8 <= j.R; k += 8)
    UNROLL for (int r = 0; r < 4; r++) {
      const int64_t n = 4 * g + r < j.N ? 4 * g + r : j.N - 1;
      const __m256 v = D::load8((const T*)j.B + n * j.R + k);
      UNROLL for (int m = 0; m < MB; m++)
        acc[r][m] = _mm256_fmadd_ps(v, _mm256_loadu_ps(j.z + (m0 + m) * j.R + k), acc[r][m]);
    }
  UNROLL for (int r = 0; r < 4; r++) UNROLL for (int m = 0; m < MB; m++) out[r][m] = sum8(acc[r][m]);
}

template <class D, int MB>
static T2 void few_avx2(const Job& j) {
#pragma omp parallel num_threads(j.threads)
  {
    if (j.R) low_rank<D>(j);
#pragma omp for schedule(dynamic, CHUNK)
    for (int64_t g = 0; g < (j.N + 3) / 4; g++) {
      float out[4][MB];
      group_avx2<D, MB>(j, g, 0, out);
      for (int r = 0; r < 4 && 4 * g + r < j.N; r++)
        for (int m = 0; m < MB; m++) finish<D>(j, m, 4 * g + r, out[r][m], j.R / 8 * 8);
    }
  }
}

// AVX-512: what a vector of L lanes is made of, and what x it meets.
struct Wide32 {
  typedef float T; typedef Float32 D; typedef __m512 V; typedef __m512 X; enum { L = 16 };
  static IN5 V expand(uint64_t m, const T* p) { return _mm512_maskz_expand_ps((__mmask16)m, _mm512_loadu_ps(p)); }
  static IN5 X load(const Job& j, int64_t i) { return _mm512_loadu_ps(j.x + i); }
  static IN5 __m512 fma(__m512 a, V v, X x) { return _mm512_fmadd_ps(v, x, a); }
};
struct WideB16 {  // a CPU without the bfloat16 dot product
  typedef uint16_t T; typedef BFloat16 D; typedef __m512 V; typedef __m512 X; enum { L = 16 };
  static IN5 V expand(uint64_t m, const T* p) {
    const __m256i v = _mm256_maskz_expand_epi16((__mmask16)m, _mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  static IN5 X load(const Job& j, int64_t i) { return _mm512_loadu_ps(j.x + i); }
  static IN5 __m512 fma(__m512 a, V v, X x) { return _mm512_fmadd_ps(v, x, a); }
};
struct WideH16 {
  typedef uint16_t T; typedef Float16 D; typedef __m512 V; typedef __m512 X; enum { L = 16 };
  static IN5 V expand(uint64_t m, const T* p) {
    return _mm512_cvtph_ps(_mm256_maskz_expand_epi16((__mmask16)m, _mm256_loadu_si256((const __m256i*)p)));
  }
  static IN5 X load(const Job& j, int64_t i) { return _mm512_loadu_ps(j.x + i); }
  static IN5 __m512 fma(__m512 a, V v, X x) { return _mm512_fmadd_ps(v, x, a); }
};
struct WideDot {
  typedef uint16_t T; typedef BFloat16 D; typedef __m512i V; typedef __m512i X; enum { L = 32 };
  static IN5B V expand(uint64_t m, const T* p) { return _mm512_maskz_expand_epi16((__mmask32)m, _mm512_loadu_si512(p)); }
  static IN5B X load(const Job& j, int64_t i) { return _mm512_loadu_si512(j.xb + i); }
  static IN5B __m512 fma(__m512 a, V v, X x) { return _mm512_dpbf16_ps(a, (__m512bh)v, (__m512bh)x); }
};

// One body for both AVX-512 targets: a function cannot inline one whose target it lacks.
#define FEW_AVX512(NAME, TGT, INL)                                                                                     \
  template <class W, int MB>                                                                                           \
  static INL void group_##NAME(const Job& j, int64_t g, float out[4][MB]) {                                            \
    typedef typename W::T T;                                                                                           \
    const uint64_t* b = j.bits + g * j.words * 4;                                                                      \
    const T* p = (const T*)j.vals + j.offs[g];                                                                         \
    __m512 acc[4][MB];                                                                                                 \
    UNROLL for (int r = 0; r < 4; r++) UNROLL for (int m = 0; m < MB; m++) acc[r][m] = _mm512_setzero_ps();            \
    for (int64_t i = 0; i < j.words; i++, b += 4) {                                                                    \
      uint64_t w[4];                                                                                                   \
      const T* q[4];                                                                                                   \
      UNROLL for (int r = 0; r < 4; r++) {                                                                             \
        w[r] = b[r];                                                                                                   \
        q[r] = r ? q[r - 1] + __builtin_popcountll(w[r - 1]) : p;                                                      \
        PREFETCH(p + 32 * r, AHEAD);                                                                                   \
        if (sizeof(T) == 4) PREFETCH(p + 32 * r + 16, AHEAD);                                                          \
      }                                                                                                                \
      p = q[3] + __builtin_popcountll(w[3]);                                                                           \
      UNROLL for (int s = 0; s < 64 / W::L; s++) {                                                                     \
        typename W::X xv[MB];                                                                                          \
        UNROLL for (int m = 0; m < MB; m++) xv[m] = W::load(j, m * j.ldx + 64 * i + W::L * s);                         \
        UNROLL for (int r = 0; r < 4; r++) {                                                                           \
          const int64_t skip = s ? __builtin_popcountll(w[r] << (s ? 64 - W::L * s : 0)) : 0;                          \
          const typename W::V e = W::expand(w[r] >> (W::L * s), q[r] + skip);                                          \
          UNROLL for (int m = 0; m < MB; m++) acc[r][m] = W::fma(acc[r][m], e, xv[m]);                                 \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int r = 0; r < 4; r++) UNROLL for (int m = 0; m < MB; m++) out[r][m] = _mm512_reduce_add_ps(acc[r][m]); \
  }                                                                                                                    \
  template <class W, int MB>                                                                                           \
  static TGT void few_##NAME(const Job& j) {                                                                           \
    _Pragma("omp parallel num_threads(j.threads)") {                                                                   \
      if (j.R) low_rank<typename W::D>(j);                                                                             \
      _Pragma("omp for schedule(dynamic, CHUNK)") for (int64_t g = 0; g < (j.N + 3) / 4; g++) {                        \
        float out[4][MB];                                                                                              \
        group_##NAME<W, MB>(j, g, out);                                                                                \
        for (int r = 0; r < 4 && 4 * g + r < j.N; r++)                                                                 \
          for (int m = 0; m < MB; m++) finish<typename W::D>(j, m, 4 * g + r, out[r][m], 0);                           \
      }                                                                                                                \
    }                                                                                                                  \
  }
FEW_AVX512(avx512, T5, IN5)
FEW_AVX512(avx512bf16, T5B, IN5B)

// ---- many rows of x: decode a tile beside the products with it ---------------------------------------------------------
// A panel is 16 rows of W, WIDE columns, transposed: [column][16 rows], 16 KB. It is decoded, then met by every block of
// rows of x, which lie packed as [block][column][row]. With PAIRS a "column" is two bfloat16 in one 32-bit lane.
enum { PANEL = 16, PANELS = 4, WIDE_WORDS = 4, BLOCK_ROWS = 252, MOST = 12 };
typedef void (*Micro)(const uint32_t* xp, const uint32_t* panel, int64_t k, float* c, bool first);

template <int MR>
static T2 void micro_avx2(const uint32_t* xp, const uint32_t* panel, int64_t k, float* c, bool first) {
  const float *x = (const float*)xp, *w = (const float*)panel;
  __m256 a[MR][2];
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int h = 0; h < 2; h++)
    a[m][h] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(c + 16 * m + 8 * h);
  for (int64_t i = 0; i < k; i++, w += 16, x += MR) {
    const __m256 w0 = _mm256_load_ps(w), w1 = _mm256_load_ps(w + 8);
    UNROLL for (int m = 0; m < MR; m++) {
      const __m256 v = _mm256_broadcast_ss(x + m);
      a[m][0] = _mm256_fmadd_ps(v, w0, a[m][0]);
      a[m][1] = _mm256_fmadd_ps(v, w1, a[m][1]);
    }
  }
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int h = 0; h < 2; h++) _mm256_storeu_ps(c + 16 * m + 8 * h, a[m][h]);
}
template <int MR>
static T5 void micro_avx512(const uint32_t* xp, const uint32_t* panel, int64_t k, float* c, bool first) {
  const float *x = (const float*)xp, *w = (const float*)panel;
  __m512 a[MR];
  UNROLL for (int m = 0; m < MR; m++) a[m] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + 16 * m);
  for (int64_t i = 0; i < k; i++, w += 16, x += MR) {
    const __m512 v = _mm512_loadu_ps(w);
    UNROLL for (int m = 0; m < MR; m++) a[m] = _mm512_fmadd_ps(_mm512_set1_ps(x[m]), v, a[m]);
  }
  UNROLL for (int m = 0; m < MR; m++) _mm512_storeu_ps(c + 16 * m, a[m]);
}
template <int MR>
static T5B void micro_pairs(const uint32_t* x, const uint32_t* w, int64_t k, float* c, bool first) {
  __m512 a[MR];
  UNROLL for (int m = 0; m < MR; m++) a[m] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + 16 * m);
  for (int64_t i = 0; i < k; i++, w += 16, x += MR) {
    const __m512i v = _mm512_loadu_si512(w);
    UNROLL for (int m = 0; m < MR; m++)
      a[m] = _mm512_dpbf16_ps(a[m], (__m512bh)v, (__m512bh)_mm512_set1_epi32((int)x[m]));
  }
  UNROLL for (int m = 0; m < MR; m++) _mm512_storeu_ps(c + 16 * m, a[m]);
}
#define SIX(f) f<1>, f<2>, f<3>, f<4>, f<5>, f<6>
static const Micro MICRO_AVX2[] = {nullptr, SIX(micro_avx2)};
static const Micro MICRO_AVX512[] = {nullptr, SIX(micro_avx512), micro_avx512<7>, micro_avx512<8>, micro_avx512<9>,
                                     micro_avx512<10>, micro_avx512<11>, micro_avx512<12>};
static const Micro MICRO_PAIRS[] = {nullptr, SIX(micro_pairs), micro_pairs<7>, micro_pairs<8>, micro_pairs<9>,
                                    micro_pairs<10>, micro_pairs<11>, micro_pairs<12>};

static IN2 void transpose8(const float* rows, int64_t ld, float* out) {  // out[column][16], 8 of its rows
  __m256 r[8], t[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows + i * ld);
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + 16 * i, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + 16 * (i + 4), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

// Decodes `words` words of the 4 groups at `g`, whose places in the values are at[0..3], into a panel.
template <class D, bool PAIRS>
static T2 void fill(const Job& j, int64_t g, int64_t word, int64_t words, const typename D::T** at, float* panel) {
  typedef typename D::T T;
  constexpr int LANES = PAIRS ? 32 : 64;
  alignas(64) float rows[PANEL][LANES + 8];  // 8 more: rows at a power of two apart would share their cache sets
  const int64_t groups = (j.N + 3) / 4;
  for (int64_t i = word; i < word + words; i++) {
    for (int q = 0; q < 4; q++) {
      if (g + q >= groups) {
        for (int r = 0; r < 4; r++) memset(rows[4 * q + r], 0, LANES * 4);
        continue;
      }
      const uint64_t* b = j.bits + ((g + q) * j.words + i) * 4;
      const T* p = at[q];
      for (int r = 0; r < 4; r++) {
        const uint64_t w = b[r];
        PREFETCH(p, AHEAD / 2);
        UNROLL for (int s = 0; s < 8; s++) {
          if (PAIRS) D::store8((T*)rows[4 * q + r] + 8 * s, w, s, p);
          else _mm256_storeu_ps(rows[4 * q + r] + 8 * s, D::expand(w, s, p));
        }
        p += __builtin_popcountll(w);
      }
      at[q] = p;
    }
    for (int k = 0; k < LANES; k += 8, panel += 8 * 16) {
      transpose8(&rows[0][k], LANES + 8, panel);
      transpose8(&rows[8][k], LANES + 8, panel + 8);
    }
  }
}

template <class D>
static T2 void put16(const float* c, const float* bias, typename D::T* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) D::put(y + i, c[i] + bias[i]);
}

// Rows m0..m0+rows of x against PANELS panels from row n0 of W.
template <class D, bool PAIRS>
static T2 void tile(const Job& j, const Micro* micro, const Micro* plain, int MR, int64_t m0, int64_t rows, int64_t n0, float* scratch) {
  typedef typename D::T T;
  constexpr int LANES = PAIRS ? 32 : 64;
  const int64_t ldk = j.words * LANES, blocks = (rows + MR - 1) / MR, groups = (j.N + 3) / 4;
  float *panel = scratch, *sums = scratch + j.scratch_floats - PANELS * PANEL * (BLOCK_ROWS + MOST), bias[PANEL];
  const T* at[PANELS][4];
  for (int p = 0; p < PANELS; p++)
    for (int q = 0; q < 4; q++) {
      const int64_t g = n0 / 4 + 4 * p + q;
      at[p][q] = (const T*)j.vals + (g < groups ? j.offs[g] : 0);
    }
  const auto all = [&](int p, const Micro* kernel, const float* x, int64_t stride, int64_t k, bool first) {
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t mr = rows - b * MR < MR ? rows - b * MR : MR;
      // A short block is packed with its own number of rows.
      const float* xb = x + (m0 + b * MR) * stride;
      kernel[mr]((const uint32_t*)(xb), (const uint32_t*)panel, k, sums + (p * blocks + b) * MR * PANEL, first);
    }
  };
  for (int64_t word = 0; word < j.words; word += WIDE_WORDS) {
    const int64_t words = j.words - word < WIDE_WORDS ? j.words - word : WIDE_WORDS;
    for (int p = 0; p < PANELS && n0 + p * PANEL < j.N; p++) {
      fill<D, PAIRS>(j, n0 / 4 + 4 * p, word, words, at[p], panel);
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t mr = rows - b * MR < MR ? rows - b * MR : MR;
        const float* xb = j.xp + (m0 + b * MR) * ldk + word * LANES * mr;
        micro[mr]((const uint32_t*)xb, (const uint32_t*)panel, words * LANES, sums + (p * blocks + b) * MR * PANEL, word == 0);
      }
    }
  }
  for (int p = 0; p < PANELS && n0 + p * PANEL < j.N; p++) {
    const int64_t n = n0 + p * PANEL, wide = j.N - n < PANEL ? j.N - n : PANEL;
    for (int64_t i = 0; i < PANEL; i++) bias[i] = j.bias && i < wide ? D::get(((const T*)j.bias)[n + i]) : 0;
    if (j.R) {
      for (int64_t r = 0; r < j.R; r++)
        for (int64_t i = 0; i < PANEL; i++) panel[r * PANEL + i] = i < wide ? D::get(((const T*)j.B)[(n + i) * j.R + r]) : 0;
      all(p, plain, j.xp + j.M * ldk, j.R, j.R, j.words == 0);
    }
    for (int64_t m = 0; m < rows; m++)
      put16<D>(sums + (p * blocks + m / MR) * MR * PANEL + m % MR * PANEL, bias, (T*)j.y + (m0 + m) * j.N + n, wide);
  }
}

// [rows][ld] -> [block][k][row]; a block never crosses a multiple of BLOCK_ROWS, which MR divides.
static void pack(const uint32_t* x, int64_t M, int64_t ld, int64_t k, int MR, int64_t m, uint32_t* out) {
  const int64_t mr = M - m < MR ? M - m : MR;
  uint32_t* o = out + m * k;
  for (int64_t i = 0; i < k; i++)
    for (int64_t r = 0; r < mr; r++) o[i * mr + r] = x[(m + r) * ld + i];
}

template <class D, bool PAIRS>
static T2 void many(const Job& j, const void* x, const Micro* micro, const Micro* plain, int MR) {
  const int64_t ldk = j.words * (PAIRS ? 32 : 64), chunks = (j.N + PANEL * PANELS - 1) / (PANEL * PANELS);
  const int64_t supers = (j.M + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel num_threads(j.threads)
  {
    if ((const void*)j.x != x) {
#pragma omp for schedule(static)
      for (int64_t m = 0; m < j.M; m++)
        widen<D>((const typename D::T*)x + m * j.K, 1, j.K, (float*)j.x + m * j.ldx, j.ldx);
    }
    if (j.R) low_rank<D>(j);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < (j.M + MR - 1) / MR; b++) {
      pack(PAIRS ? (const uint32_t*)j.xb : (const uint32_t*)j.x, j.M, ldk, ldk, MR, b * MR, (uint32_t*)j.xp);
      if (j.R) pack((const uint32_t*)j.z, j.M, j.R, j.R, MR, b * MR, (uint32_t*)(j.xp + j.M * ldk));
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < chunks * supers; t++) {
      const int64_t m0 = t % supers * BLOCK_ROWS, rows = j.M - m0 < BLOCK_ROWS ? j.M - m0 : BLOCK_ROWS;
      tile<D, PAIRS>(j, micro, plain, MR, m0, rows, t / supers * PANEL * PANELS, j.scratch + thread_id() * j.scratch_floats);
    }
  }
}

// ---- one call ----------------------------------------------------------------------------------------------------------
template <class D>
static T2 void run_avx2(const Job& j, const void* x) {
  if (j.M == 1) few_avx2<D, 1>(j);
  else if (j.M == 2) few_avx2<D, 2>(j);
  else many<D, false>(j, x, MICRO_AVX2, MICRO_AVX2, 6);
}
template <class W>
static void run_avx512(const Job& j, const void* x) {
  if (j.M == 1) few_avx512<W, 1>(j);
  else if (j.M == 2) few_avx512<W, 2>(j);
  else many<typename W::D, false>(j, x, MICRO_AVX512, MICRO_AVX512, 12);
}
static void run_pairs(const Job& j, const void* x) {
  if (j.M == 1) few_avx512bf16<WideDot, 1>(j);
  else if (j.M == 2) few_avx512bf16<WideDot, 2>(j);
  else many<BFloat16, true>(j, x, MICRO_PAIRS, MICRO_AVX512, 12);
}

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class D>
static int linear(Job j, int dtype, int isa, const void* x) {
  const bool pairs = dtype == BF16 && isa == AVX512BF16, few = j.M <= 2;
  const bool direct = dtype == F32 && j.K % 64 == 0;
  const int64_t nx = direct ? 0 : up(j.M * j.ldx, 16), nb = pairs ? up(j.M * j.ldx / 2, 16) : 0, nz = up(j.M * j.R, 16);
  const int64_t np = few ? 0 : up(j.M * (j.ldx + j.R), 16);
  const int64_t panel = PANEL * (j.R > 64 * WIDE_WORDS ? j.R : 64 * WIDE_WORDS);
  j.scratch_floats = few ? 0 : up(panel + PANELS * PANEL * (BLOCK_ROWS + MOST), 1024) + 16;
  float* arena = nullptr;
  const int64_t total = nx + nb + nz + np + j.scratch_floats * j.threads + 64;
  if (posix_memalign((void**)&arena, 64, total * sizeof(float))) return 1;
  j.x = direct ? (const float*)x : arena;
  uint16_t* xb = (uint16_t*)(arena + nx);
  j.xb = xb;
  j.z = arena + nx + nb;
  j.xp = j.z + nz;
  j.scratch = j.xp + np;
  if (few && !direct) widen<D>((const typename D::T*)x, j.M, j.K, (float*)j.x, j.ldx);
  if (pairs)
    for (int64_t m = 0; m < j.M; m++) {
      memcpy(xb + m * j.ldx, (const uint16_t*)x + m * j.K, j.K * 2);
      memset(xb + m * j.ldx + j.K, 0, (j.ldx - j.K) * 2);
    }
  if (pairs) run_pairs(j, x);
  else if (isa < AVX512) run_avx2<D>(j, x);
  else if (dtype == F32) run_avx512<Wide32>(j, x);
  else if (dtype == BF16) run_avx512<WideB16>(j, x);
  else run_avx512<WideH16>(j, x);
  free(arena);
  return 0;
}

template <class D>
static T2 void decode_rows(const uint64_t* bits, const typename D::T* vals, const int64_t* offs, int64_t N, int64_t K,
                           typename D::T* out, int threads) {
  typedef typename D::T T;
  const int64_t words = (K + 63) / 64, groups = (N + 3) / 4;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t g = 0; g < groups; g++) {
    const T* p = vals + offs[g];
    alignas(64) T word[64];
    for (int64_t i = 0; i < words; i++)
      for (int r = 0; r < 4; r++) {
        const uint64_t w = bits[(g * words + i) * 4 + r];
        const int64_t n = 4 * g + r, wide = K - 64 * i < 64 ? K - 64 * i : 64;
        if (n < N) {
          T* o = wide == 64 ? out + n * K + 64 * i : word;
          UNROLL for (int s = 0; s < 8; s++) D::store8(o + 8 * s, w, s, p);
          if (wide < 64) memcpy(out + n * K + 64 * i, word, wide * sizeof(T));
        }
        p += __builtin_popcountll(w);
      }
  }
}

// ---- the baselines of the benchmark ----------------------------------------------------------------------------------
// bfloat16: two rows of 8 floats come out of 16 values by a shift and a mask, even and odd columns apart, as x lies here.
static T2 float dense_bf16(const uint16_t* a, const float* x, int64_t K) {
  __m256 s[8];
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  UNROLL for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 64 <= K; k += 64) {
    PREFETCH(a + k, 1024);
    PREFETCH(a + k, 1088);
    UNROLL for (int i = 0; i < 4; i++) {
      const __m256i v = _mm256_loadu_si256((const __m256i*)(a + k + 16 * i));
      s[2 * i] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), _mm256_loadu_ps(x + k + 16 * i), s[2 * i]);
      s[2 * i + 1] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(v, upper)), _mm256_loadu_ps(x + k + 16 * i + 8), s[2 * i + 1]);
    }
  }
  UNROLL for (int i = 1; i < 8; i++) s[0] = _mm256_add_ps(s[0], s[i]);
  float t = sum8(s[0]);
  for (; k < K; k++) t += BFloat16::get(a[k]) * x[k];
  return t;
}
static T2 float dense_f32(const float* a, const float* x, int64_t K) {
  __m256 s[8];
  UNROLL for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 64 <= K; k += 64)
    UNROLL for (int i = 0; i < 8; i++) s[i] = _mm256_fmadd_ps(_mm256_loadu_ps(a + k + 8 * i), _mm256_loadu_ps(x + k + 8 * i), s[i]);
  UNROLL for (int i = 1; i < 8; i++) s[0] = _mm256_add_ps(s[0], s[i]);
  float t = sum8(s[0]);
  for (; k < K; k++) t += a[k] * x[k];
  return t;
}
static T2 void dense_all(int dtype, const void* W, const float* x, void* y, int64_t N, int64_t K, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 64)
  for (int64_t n = 0; n < N; n++) {
    if (dtype == F32) ((float*)y)[n] = dense_f32((const float*)W + n * K, x, K);
    else BFloat16::put((uint16_t*)y + n, dense_bf16((const uint16_t*)W + n * K, x, K));
  }
}
static T2 float stream_all(const float* p, int64_t n, int threads) {
  const int64_t page = 65536;
  float total = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) reduction(+ : total)
  for (int64_t b = 0; b < n / page; b++) {
    __m256 s[8];
    UNROLL for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < page; k += 64)
      UNROLL for (int i = 0; i < 8; i++) s[i] = _mm256_add_ps(_mm256_loadu_ps(p + b * page + k + 8 * i), s[i]);
    UNROLL for (int i = 1; i < 8; i++) s[0] = _mm256_add_ps(s[0], s[i]);
    total += sum8(s[0]);
  }
  return total;
}
#endif  // X86

// y[M][N] = x[M][K] W^T + (x A^T) B^T + bias; A [R][K], B [N][R], all of `dtype`; isa < 0 chooses. 0, or what is wrong:
// 1 no memory, 2 no such instruction set here, 3 no such dtype.
API int salr_linear(int dtype, int isa, const void* bits, const void* vals, const void* offs, const void* x, const void* A,
                    const void* B, const void* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t R, int threads) {
#ifdef X86
  const int best = salr_isa();
  if (isa < 0) isa = best >= AVX512 && M <= 2 && salr_prefers_tables() ? AVX2 : best;
  if (isa == PORTABLE || isa > best) return 2;
  if (threads < 1) threads = 1;
  if (M == 0 || N == 0) return 0;
  const int64_t words = (K + 63) / 64;
  const Job j = {(const uint64_t*)bits, vals, (const int64_t*)offs, nullptr, nullptr, bias, A, B, y, M, N, K, R, words,
                 words * 64, nullptr, nullptr, nullptr, 0, threads};
  if (dtype == F32) return linear<Float32>(j, dtype, isa, x);
  if (dtype == BF16) return linear<BFloat16>(j, dtype, isa, x);
  if (dtype == F16) return linear<Float16>(j, dtype, isa, x);
  return 3;
#else
  return 2;
#endif
}

// out[N][K] = W. `size` is that of a value in bytes, 2 or 4.
API int salr_decode(int size, int isa, const void* bits, const void* vals, const void* offs, int64_t N, int64_t K, void* out,
                    int threads) {
  const uint64_t* b = (const uint64_t*)bits;
  const int64_t* o = (const int64_t*)offs;
  if (threads < 1) threads = 1;
  if (size != 2 && size != 4) return 3;
#ifdef X86
  if (isa != PORTABLE && salr_isa() >= AVX2) {
    if (size == 4) decode_rows<Float32>(b, (const float*)vals, o, N, K, (float*)out, threads);
    else decode_rows<Half16>(b, (const uint16_t*)vals, o, N, K, (uint16_t*)out, threads);
    return 0;
  }
#endif
  if (size == 4) decode_plain<uint32_t>(b, (const uint32_t*)vals, o, N, K, (uint32_t*)out, threads);
  else decode_plain<uint16_t>(b, (const uint16_t*)vals, o, N, K, (uint16_t*)out, threads);
  return 0;
}

// The benchmark's own dense product, y[N] = W x for one vector; x is float, for bfloat16 with even and odd columns of each
// 16 apart. And the sum of n floats: what memory streams.
API int salr_dense(int dtype, const void* W, const void* x, void* y, int64_t N, int64_t K, int threads) {
#ifdef X86
  if (salr_isa() < AVX2) return 2;
  if (dtype > BF16) return 3;
  dense_all(dtype, W, (const float*)x, y, N, K, threads);
  return 0;
#else
  return 2;
#endif
}
API float salr_stream(const void* p, int64_t n, int threads) {
#ifdef X86
  return stream_all((const float*)p, n, threads);
#else
  return 0;
#endif
}

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
// Asks for huge pages below [p, p + n): a page walk each 4 KB costs a stream a tenth to a quarter. Refusals do no harm.
API int salr_huge(void* p, int64_t n) {
  const uintptr_t page = 2u << 20, from = ((uintptr_t)p + page - 1) / page * page, to = ((uintptr_t)p + n) / page * page;
  if (to <= from) return 1;
  if (madvise((void*)from, to - from, MADV_HUGEPAGE)) return 2;
  return madvise((void*)from, to - from, MADV_COLLAPSE) ? 3 : 0;
}
#else
API int salr_huge(void*, int64_t) { return 2; }
#endif
