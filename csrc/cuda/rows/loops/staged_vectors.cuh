// Rows that pass through shared memory on their way in and out: runs of bytes, which bulk copies carry (cp.async.bulk, compute
// capability 9.0 and up), and what a thread reads and writes of them in between. Results take the place of the elements. No
// access to global memory sees where a row begins or ends.
//
// A run may start anywhere. It is copied as the aligned vectors that hold it, and lies as far past a multiple of 16 bytes in
// shared memory as it does in global memory; or it lies at a multiple of 16 bytes, and threads shift it. Only the ends of a run
// of results are written by elements.
//
// Which thread has which class depends on the row's length alone (Deal).
#pragma once

#include "../../hw/cp_async.cuh"
#include "../../hw/mbarrier.cuh"
#include "../../hw/tma.cuh"
#include "register_row.cuh"

namespace flash_online::cuda {

// ---- runs

// A run of elements in global memory, and its place in shared memory.
template <class T>
struct Run {
  T* global;
  char* shared;
  unsigned bytes;

  // Bytes before the run's first multiple of 16 in global memory.
  __device__ __forceinline__ unsigned head() const {
    const unsigned head = (kVectorBytes - misalignment(global)) % kVectorBytes;
    return head < bytes ? head : bytes;
  }
  __device__ __forceinline__ const char* global_bytes() const { return reinterpret_cast<const char*>(global); }

  // Starts the copy to shared memory; returns its bytes, which `barrier` counts.
  __device__ __forceinline__ unsigned load(uint64_t* barrier) const {
    const unsigned skip = misalignment(global), rounded = round_up(skip + bytes, unsigned{kVectorBytes});
    bulk_load(shared - skip, global_bytes() - skip, rounded, barrier);
    return rounded;
  }
  // Starts the copy to global memory (tma_store_commit follows).
  __device__ __forceinline__ void store() const {
    store_ends();
    const unsigned begin = head(), middle = (bytes - begin) / kVectorBytes * kVectorBytes;
    if (middle != 0) bulk_store(reinterpret_cast<char*>(global) + begin, shared + begin, middle);
  }

  // The share of thread number `thread` of `threads`, where there are no bulk copies or where rows are shifted.
  __device__ __forceinline__ void load_by_threads(int thread, int threads) const {
    const unsigned skip = misalignment(global);
    for (unsigned b = thread * kVectorBytes; b < skip + bytes; b += threads * kVectorBytes)
      cp_async(reinterpret_cast<uint4*>(shared - skip + b), global_bytes() - skip + b);
  }
  __device__ __forceinline__ void load_shifted(int thread, int threads) const {
    const unsigned skip = misalignment(global);
    for (unsigned b = thread * kVectorBytes; b < bytes; b += threads * kVectorBytes) {
      const char* at = global_bytes() - skip + b;
      const uint4 v = load_streaming(at);  // only vectors that hold an element of the run are read
      const bool more = skip + bytes - b > kVectorBytes && skip != 0;
      *reinterpret_cast<uint4*>(shared + b) = bytes_from(v, more ? load_streaming(at + kVectorBytes) : v, skip);
    }
  }
  template <bool kShifted>
  __device__ __forceinline__ void store_by_threads(int thread, int threads) const {
    if (thread == 0) store_ends();
    const unsigned begin = head();
    for (unsigned b = begin + thread * kVectorBytes; b + kVectorBytes <= bytes; b += threads * kVectorBytes) {
      const uint4* at = reinterpret_cast<const uint4*>(shared + (kShifted ? b - begin : b));
      store_streaming(reinterpret_cast<char*>(global) + b, kShifted ? bytes_from(at[0], at[1], begin) : at[0]);
    }
  }

 private:
  // Stores by elements what of the run is not a whole vector in global memory.
  __device__ __forceinline__ void store_ends() const {
    const T* from = reinterpret_cast<const T*>(shared);
    const int begin = head() / sizeof(T), all = bytes / sizeof(T);
    for (int e = 0; e < begin; ++e) global[e] = from[e];
    for (int e = begin + (all - begin) / kPerVector<T> * kPerVector<T>; e < all; ++e) global[e] = from[e];
  }
};

// ---- what a thread has of a row

// The distribution of a row over its threads. Rows of a whole number of vectors (is_whole in choice.h) are dealt by vectors of
// 16 bytes, which are aligned in shared memory. All other rows are dealt by words of 4 bytes, so that neighbouring threads have
// neighbouring words: no length has bank conflicts. kOddWords is for words that may be off a multiple of 4 bytes: rows of
// 16-bit elements.
enum class Deal { kVectors, kWords, kOddWords };

constexpr int kWordsPerVector = kVectorBytes / 4;

// The classes of one vector of a thread, a part of the segment that begins at word `first` of the row. In a segment a thread
// has a vector of neighbouring words, or the words thread, thread + kThreads, ...
template <int kThreads, int kPerWord, Deal kDeal>
struct StagedClasses {
  int first, thread;
  __device__ __forceinline__ int operator()(int e) const {
    const int word = kDeal == Deal::kVectors ? thread * kWordsPerVector + e / kPerWord : e / kPerWord * kThreads + thread;
    return (first + word) * kPerWord + e % kPerWord;
  }
  __device__ __forceinline__ bool within(int e, int classes) const {
    return kDeal == Deal::kVectors || operator()(e) < classes;
  }
  __device__ __forceinline__ bool contain(int c) const {
    const int word = c / kPerWord - first;
    if (word < 0 || word >= kThreads * kWordsPerVector) return false;
    return (kDeal == Deal::kVectors ? word / kWordsPerVector : word % kThreads) == thread;
  }
};

// A thread's vectors of a row in shared memory, or in global memory (GlobalSegments). They are kept in registers if kHeld, else
// read again each time. A row consists of segments; a thread has vector i in segment i. Segments says where segments are:
//   kThreads, kUnroll             threads that share a segment; how far loops over vectors are unrolled
//   count()                       vectors per thread, at most
//   first_word(i)                 the word of the row at which segment i begins
//   offset(i)                     bytes from the begin of segment 0 to that of segment i, where the row is
//   offset_of(word), has(word)    the same for a word of the row; whether it is in a segment of this CTA
//   wait()                        until the row has arrived
// The members are those of RegisterVectors (register_row.cuh).
template <class Segments, class T, Deal kDeal, bool kHeld>
class StagedVectors {
 public:
  using Group = typename Segments::Group;
  static constexpr int kThreads = Segments::kThreads, kPerWord = 4 / static_cast<int>(sizeof(T));
  static constexpr int kUnroll = Segments::kUnroll, kElements = kPerVector<T>;
  using Classes = StagedClasses<kThreads, kPerWord, kDeal>;

  // `row` is in shared memory, as is `result`, the place of results that are written to the view `of_result`. A row that does
  // not exist has classes 0; `longest` is the length of those that do.
  __device__ __forceinline__ StagedVectors(const Segments& segments, const char* row, int classes, int longest,
                                           const MutableView3* of_result, char* result)
      : segments_(segments), row_(row), result_(result), of_result_(of_result), classes_(classes), longest_(longest) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < count(); ++i)
        if (has(i)) v_[i] = load(i);
    }
  }
  __device__ __forceinline__ void wait() const { segments_.wait(); }
  __device__ __forceinline__ constexpr int count() const { return segments_.count(); }
  __device__ __forceinline__ bool has(int i) const {
    if (kUnroll >= count() && i == 0) return true;  // known where loops are unrolled: every row begins in segment 0
    return segments_.first_word(i) * kPerWord < longest_;
  }
  __device__ __forceinline__ uint4 operator[](int i) const {
    if constexpr (kHeld)
      return v_[i];
    else
      return load(i);
  }
  __device__ __forceinline__ uint4 reload(int i, float sum) const {
    if constexpr (kHeld)
      return make_opaque<T>(v_[i], sum);
    else
      return load(i);
  }
  __device__ __forceinline__ Classes classes_of(int i) const { return {segments_.first_word(i), segments_.thread()}; }
  __device__ __forceinline__ bool owns(int c) const {
    const int word = c / kPerWord;
    return (kDeal == Deal::kVectors ? word / kWordsPerVector : word) % kThreads == segments_.thread() && segments_.has(word);
  }
  __device__ __forceinline__ float element_of(int c) const {
    return widen(*reinterpret_cast<const T*>(row_ + segments_.offset_of(c / kPerWord) + c % kPerWord * sizeof(T)));
  }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return segments_.template merge_warps<kSlot>(state);
  }
  template <class Result, class F>
  __device__ __forceinline__ void visit_writer(const MutableView3& view, const RowCoord& coord, int, const F& f) const {
    const bool here = is_here<Result>(view);
    Result* const elsewhere = here ? nullptr : row_elsewhere<Result>(view, coord);
    f([=, this](const Classes& c, int i, const float (&z)[kElements]) {
      if (here)
        write<Result>(i, z);
      else
        write_elements(elsewhere, i, c, z);
    });
  }

  // Writes the element of a class that this thread has, after the writer has written its vector.
  template <class Result>
  __device__ __forceinline__ void write_element(const MutableView3& view, const RowCoord& coord, int c, float z) const {
    if (is_here<Result>(view))
      *reinterpret_cast<Result*>(result_ + segments_.offset_of(c / kPerWord) + c % kPerWord * sizeof(T)) = narrow<Result>(z);
    else
      row_elsewhere<Result>(view, coord)[c] = narrow<Result>(z);
  }

 private:
  // True if results take the elements' places.
  template <class Result>
  __device__ __forceinline__ bool is_here(const MutableView3& view) const {
    return sizeof(Result) == sizeof(T) && &view == of_result_;
  }
  template <class Result>
  __device__ __forceinline__ Result* row_elsewhere(const MutableView3& view, const RowCoord& coord) const {
    if (Segments::kStagesOtherSizes && &view == of_result_) return reinterpret_cast<Result*>(result_);
    return row_of<Result>(view, coord).data;
  }
  // The begin of this thread's word j of segment i, in a row of words: in bytes from the row's begin.
  __device__ __forceinline__ int offset_of(int i, int j) const {
    return segments_.offset(i) + (segments_.thread() + j * kThreads) * 4;
  }
  // The row's bytes in segment i that do not belong to the words before this thread's first: how far it may access.
  __device__ __forceinline__ int left_in_row(int i) const {
    return (classes_ - (segments_.first_word(i) + segments_.thread()) * kPerWord) * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ bool is_full(int i) const {
    return (segments_.first_word(i) + kThreads * kWordsPerVector) * kPerWord <= classes_;
  }

  __device__ __forceinline__ uint4 load(int i) const {
    if constexpr (kDeal == Deal::kVectors) {
      const int word = segments_.first_word(i) + segments_.thread() * 4;
      if (word * kPerWord >= classes_) return lowest_vector<T>();
      return *reinterpret_cast<const uint4*>(row_ + segments_.offset(i) + segments_.thread() * kVectorBytes);
    } else {
      const auto elements = [&](int j) { return reinterpret_cast<const unsigned short*>(row_ + offset_of(i, j)); };
      const auto word = [&](int j) -> unsigned {
        if constexpr (kDeal == Deal::kOddWords)
          return elements(j)[0] | unsigned{elements(j)[1]} << 16;
        else
          return *reinterpret_cast<const unsigned*>(row_ + offset_of(i, j));
      };
      unsigned w[4] = {};
      if (is_full(i)) {
#pragma unroll
        for (int j = 0; j < kWordsPerVector; ++j) w[j] = word(j);
      } else {
        const int left = left_in_row(i);
#pragma unroll
        for (int j = 0; j < kWordsPerVector; ++j) {
          const int left_here = left - j * kThreads * 4;
          w[j] = lowest_vector<T>().x;
          if (left_here >= 4) w[j] = word(j);
          // Another warp may be writing the element after the row's last one.
          if (sizeof(T) == 2 && left_here == 2) w[j] = __byte_perm(*elements(j), lowest_vector<T>().x, 0x7610);
        }
      }
      return {w[0], w[1], w[2], w[3]};
    }
  }

  // Results of the elements' size take the elements' places.
  template <class Result>
  __device__ __forceinline__ void write(int i, const float (&z)[kElements]) const {
    const uint4 packed = pack<Result>(z);
    if constexpr (kDeal == Deal::kVectors) {
      if ((segments_.first_word(i) + segments_.thread() * 4) * kPerWord < classes_)
        *reinterpret_cast<uint4*>(result_ + segments_.offset(i) + segments_.thread() * kVectorBytes) = packed;
    } else {
      const unsigned w[4] = {packed.x, packed.y, packed.z, packed.w};
      char* const at = result_ + offset_of(i, 0);
      const auto word = [&](int j) -> unsigned& { return *reinterpret_cast<unsigned*>(at + j * kThreads * 4); };
      const bool full = is_full(i);
      if (kDeal == Deal::kWords && full) {
#pragma unroll
        for (int j = 0; j < kWordsPerVector; ++j) word(j) = w[j];
        return;
      }
      const int left = left_in_row(i);
#pragma unroll
      for (int j = 0; j < kWordsPerVector; ++j) {
        const int left_here = left - j * kThreads * 4;
        unsigned short* elements = reinterpret_cast<unsigned short*>(&word(j));
        if (kDeal == Deal::kWords && left_here >= 4) {
          word(j) = w[j];
        } else if constexpr (sizeof(T) == 2) {
          if (full || left_here >= 2) elements[0] = static_cast<unsigned short>(w[j]);
          if (full || left_here >= 4) elements[1] = static_cast<unsigned short>(w[j] >> 16);
        }
      }
    }
  }
  template <class Result>
  __device__ __forceinline__ void write_elements(Result* to, int i, const Classes& c, const float (&z)[kElements]) const {
    if (is_full(i)) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) to[c(e)] = narrow<Result>(z[e]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      if (c(e) < classes_) to[c(e)] = narrow<Result>(z[e]);
  }

  Segments segments_;
  const char* row_;
  char* result_;
  const MutableView3* of_result_;
  int classes_, longest_;
  uint4 v_[kHeld ? Segments::count() : 1];
};

// Segments of kVectors vectors per thread that follow one another where the row is, all of them in reach of its kThreads
// threads.
template <class Group_, int kThreads_, int kVectors>
struct AdjacentSegments {
  using Group = Group_;
  static constexpr int kThreads = kThreads_, kUnroll = kVectors;
  __device__ __forceinline__ static constexpr int count() { return kVectors; }
  __device__ __forceinline__ static int thread() { return Group::thread_in_row(); }
  __device__ __forceinline__ static constexpr int first_word(int i) { return i * kThreads * kWordsPerVector; }
  __device__ __forceinline__ static constexpr int offset(int i) { return first_word(i) * 4; }
  __device__ __forceinline__ static int offset_of(int word) { return word * 4; }
  __device__ __forceinline__ static constexpr bool has(int) { return true; }
  __device__ __forceinline__ static void wait() {}
};

// The segments of a row that is read from global memory to registers, by the threads of a register group (register_row.cuh).
template <class Group_, int kVectors>
struct GlobalSegments : AdjacentSegments<Group_, Group_::threads_per_row(), kVectors> {
  static constexpr bool kStagesOtherSizes = false;
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    return Group_::template merge_warps<kSlot>(state);
  }
};

}  // namespace flash_online::cuda
