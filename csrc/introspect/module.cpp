// The introspection module: the algebra of online softmax on plain numbers, for tests and `python -m flash_online trace`, and
// the facts of the build. It takes no tensors, is on no operator's path, and needs no torch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../core/mask.h"
#include "../core/online_softmax.h"
#include "api.h"
#include "softmaxes.h"

namespace py = pybind11;

namespace flash_online {
namespace {

// A row of scores, or the memory for a result: a contiguous one-dimensional buffer of T, used in place. Scores may also be any
// sequence of numbers, which is copied.
template <class T>
class Row {
 public:
  Row(const py::object& object, const char* name, bool writable) {
    if (PyObject_CheckBuffer(object.ptr())) {
      info_ = py::reinterpret_borrow<py::buffer>(object).request(writable);
      if (info_.format != py::format_descriptor<T>::format()) {
        throw py::type_error(std::string(name) + ": expected buffer format '" + py::format_descriptor<T>::format() +
                             "', got '" + info_.format + "'");
      }
      if (info_.ndim != 1 || (info_.shape[0] > 1 && info_.strides[0] != sizeof(T))) {
        throw py::value_error(std::string(name) + ": expected one contiguous dimension, got a buffer of " +
                              std::to_string(info_.ndim) + " dimensions");
      }
      data_ = static_cast<T*>(info_.ptr);
      size_ = info_.shape[0];
    } else if (writable) {
      throw py::type_error(std::string(name) + ": expected a writable buffer, got " +
                           std::string(py::str(py::type::of(object))));
    } else {
      copy_ = object.cast<std::vector<T>>();
      data_ = copy_.data();
      size_ = static_cast<int64_t>(copy_.size());
    }
  }
  T* data() const { return data_; }
  int64_t size() const { return size_; }
  T max() const {
    T max = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < size_; ++i) max = maximum(max, data_[i]);
    return max;
  }

 private:
  py::buffer_info info_;
  std::vector<T> copy_;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// The state that has absorbed the scores one by one.
template <class State, class T>
State absorbed(const py::object& scores) {
  State state;
  const Row<T> row(scores, "scores", false);
  for (int64_t i = 0; i < row.size(); ++i) state.absorb(row.data()[i]);
  return state;
}

template <class T, class Base>
void bind_state(py::module_& m, const char* name) {
  using State = OnlineSoftmax<T, Base>;
  const auto softmax = [](void (*function)(const T*, int64_t, T*)) {
    return [function](const py::object& scores, const py::object& out) {
      const Row<T> x(scores, "scores", false), y(out, "out", true);
      if (x.size() != y.size()) {
        throw py::value_error("out: expected " + std::to_string(x.size()) + " elements, as many as scores has, got " +
                              std::to_string(y.size()));
      }
      function(x.data(), x.size(), y.data());
    };
  };
  py::class_<State>(m, name,
                    "A partial result of online softmax: the maximum of a set of scores and the sum of exp(score - max).")
      .def(py::init<>(), "The empty set: max -inf, sum 0.")
      .def(py::init([](T max, T sum) { return State{max, sum}; }), py::arg("max"), py::arg("sum"))
      .def(py::init(&absorbed<State, T>), py::arg("scores"), "Absorbs the scores one by one.")
      .def_readonly("max", &State::max)
      .def_readonly("sum", &State::sum)
      .def("absorb", &State::absorb, py::arg("score"), "Adds a score; returns the factor that the old sum was multiplied by.")
      .def(
          "absorb_block",
          [](State& state, const py::object& scores) {
            const Row<T> row(scores, "scores", false);
            const T factor = state.raise_max(row.max());
            T sum = 0;
            for (int64_t i = 0; i < row.size(); ++i) sum += state.weight(row.data()[i]);
            state.add(sum);
            return factor;
          },
          py::arg("scores"), "Adds a block of scores in the kernels' two steps; returns the factor.")
      .def("merge", &State::merge, py::arg("other"), "Adds the partial result of a disjoint set.")
      .def("weight", &State::template weight<T>, py::arg("score"))
      .def("log_probability", &State::log_probability, py::arg("score"))
      .def("inverse_sum", &State::inverse_sum)
      .def("inverse_sum_or_zero", &State::inverse_sum_or_zero)
      .def("lse", &State::lse)
      .def("lse_low", &State::lse_low)
      .def_static(
          "walk",
          [](const py::object& scores) {
            const Row<T> row(scores, "scores", false);
            std::vector<std::tuple<T, T, T, T>> steps;
            State state;
            for (int64_t i = 0; i < row.size(); ++i) {
              const T score = row.data()[i], factor = state.absorb(score);
              steps.emplace_back(score, state.max, state.sum, factor);
            }
            return steps;
          },
          py::arg("scores"), "The steps of online softmax: (score, max, sum, factor) after each score.")
      .def_static("naive_softmax", softmax(naive_softmax<T, Base>), py::arg("scores"), py::arg("out"))
      .def_static("safe_softmax", softmax(safe_softmax<T, Base>), py::arg("scores"), py::arg("out"))
      .def_static("online_softmax", softmax(online_softmax<T, Base>), py::arg("scores"), py::arg("out"));
}

template <class T, class Base>
void bind_entropy(py::module_& m, const char* name) {
  using State = OnlineEntropy<T, Base>;
  py::class_<State>(m, name,
                    "A partial result of online softmax with the sum of exp(score - max) * (score - max), which gives the "
                    "entropy of the softmax.")
      .def(py::init<>(), "The empty set: max -inf, sums 0.")
      .def(py::init(&absorbed<State, T>), py::arg("scores"), "Absorbs the scores one by one.")
      .def_property_readonly("max", [](const State& state) { return state.max; })
      .def_property_readonly("sum", [](const State& state) { return state.sum; })
      .def_property_readonly("products", [](const State& state) { return state.products; })
      .def(
          "absorb_block",
          [](State& state, const py::object& scores) {
            const Row<T> row(scores, "scores", false);
            const T factor = state.raise_max(row.max());
            T sum = 0, products = 0;
            for (int64_t i = 0; i < row.size(); ++i) {
              const T score = row.data()[i], weight = state.weight(score);
              sum += weight;
              products += weight * state.distance(score);
            }
            state.add(sum, products);
            return factor;
          },
          py::arg("scores"), "Adds a block of scores in the kernels' two steps; returns the factor.")
      .def("merge", &State::merge, py::arg("other"), "Adds the partial result of a disjoint set.")
      .def("entropy", &State::entropy, "In nats, or in bits if weights are powers of 2.");
}

// A tensor [batch, heads, rows, head_dim] without its elements: sizes, strides, and the offset in bytes of its first element
// from an aligned address.
using TensorShape = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>;

template <class View>
void set_view(View& view, const TensorShape& shape) {
  const auto& [sizes, strides, offset] = shape;
  view.data = reinterpret_cast<void*>(uintptr_t{4096} + static_cast<uintptr_t>(offset));  // any address, which is never read
  for (size_t i = 0; i < 4; ++i) view.stride[i] = sizes[i] == 1 ? 0 : strides[i];
}

const std::map<std::string, DType>& dtypes() {
  static const std::map<std::string, DType> names = {{"float16", DType::kFloat16},          {"bfloat16", DType::kBFloat16},
                                                     {"float32", DType::kFloat32},          {"float64", DType::kFloat64},
                                                     {"float8_e4m3fn", DType::kFloat8E4M3}, {"bool", DType::kBool}};
  return names;
}

const Api& api_of(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) throw std::runtime_error("library: expected one loaded in this process, got " + library);
  const void* api = dlsym(handle, "flash_online_api");
  dlclose(handle);  // the reference that dlopen added; the library stays
  if (api == nullptr) throw std::runtime_error("library: expected the symbol flash_online_api, got none in " + library);
  return *static_cast<const Api*>(api);
}

int64_t attention_memory(const std::string& library, const std::string& dtype, const std::vector<int64_t>& query,
                         const std::vector<int64_t>& key, const std::vector<int64_t>& value,
                         const std::vector<int64_t>& key_strides, const std::vector<int64_t>& value_strides,
                         const std::string& mask, double dropout_p, bool lse_low, int64_t threads) {
  const size_t rank = query.size();
  AttentionProblem problem;
  problem.dtype = dtypes().at(dtype);
  problem.batch = 1;
  for (size_t i = 0; i + 3 < rank; ++i) problem.batch *= query[i];
  problem.heads = query[rank - 3], problem.key_heads = key[rank - 3], problem.value_heads = value[rank - 3];
  problem.queries = query[rank - 2], problem.keys = key[rank - 2];
  problem.head_dim = key[rank - 1], problem.head_dim_v = value[rank - 1];
  problem.dropout = dropout_p;
  for (size_t i = 0; i < 2; ++i) {
    problem.key.stride[3 - i] = key_strides[rank - 1 - i];
    problem.value.stride[3 - i] = value_strides[rank - 1 - i];
  }
  if (!mask.empty()) problem.mask.data = &problem, problem.mask_dtype = dtypes().at(mask);  // any pointer, which is never read
  if (lse_low) problem.lse_low = &problem;
  return api_of(library).attention_memory(problem, threads);
}

std::string attention_candidates(const std::string& library, const std::string& dtype, const TensorShape& query,
                                 const TensorShape& key, const TensorShape& value, const TensorShape& out,
                                 const std::optional<std::pair<std::string, TensorShape>>& mask, bool alibi, bool sinks,
                                 bool lse_low, const std::optional<std::tuple<int64_t, int64_t, int64_t>>& packed,
                                 int64_t window_left, int64_t window_right, bool lower_right, double scale, double softcap,
                                 double dropout_p, bool tf32, const std::tuple<int, int, int>& gpu,
                                 const std::optional<std::pair<TensorShape, bool>>& backward,
                                 const std::tuple<bool, bool, int>& sparsity, bool max_logit) {
  AttentionProblem problem;
  problem.dtype = dtypes().at(dtype);
  const auto size = [](const TensorShape& shape, size_t i) { return std::get<0>(shape)[i]; };
  problem.batch = size(query, 0), problem.heads = size(query, 1), problem.queries = size(query, 2);
  problem.key_heads = size(key, 1), problem.value_heads = size(value, 1), problem.keys = size(key, 2);
  problem.head_dim = size(query, 3), problem.head_dim_v = size(value, 3);
  set_view(problem.query, query), set_view(problem.key, key), set_view(problem.value, value), set_view(problem.out, out);
  if (mask) problem.mask_dtype = dtypes().at(mask->first), set_view(problem.mask, mask->second);
  const int32_t start = 0;
  if (alibi) problem.alibi_slopes = &start;
  if (sinks) problem.sinks = &start;
  float low = 0;
  if (lse_low) problem.lse_low = &low;
  if (max_logit) problem.max_logit = &low;
  if (packed) {
    problem.query_starts = problem.key_starts = &start;
    problem.total_queries = problem.queries, problem.total_keys = problem.keys;
    const auto& [sequences, longest_query, longest_key] = *packed;
    problem.batch = sequences;
    problem.queries = std::min(longest_query, problem.total_queries), problem.keys = std::min(longest_key, problem.total_keys);
  }
  problem.visible = {window_left, window_right, lower_right && !packed ? problem.keys - problem.queries : 0};
  problem.lower_right = lower_right;
  problem.scale = scale, problem.softcap = softcap, problem.dropout = dropout_p, problem.tf32 = tf32;
  const auto [query_spans, key_spans, tile_keys] = sparsity;
  const uint8_t tile = 0;
  if (query_spans) problem.query_spans.data = &start;
  if (key_spans) problem.key_spans.data = &start;
  if (tile_keys > 0) problem.tiles.data = &tile, problem.tile_keys = tile_keys;
  const Api& api = api_of(library);
  const auto [major, minor, shared_bytes] = gpu;
  AttentionGradients gradients;
  if (backward) set_view(gradients.grad_out, backward->first);
  return api.attention_candidates(problem, backward ? &gradients : nullptr, backward && backward->second, major, minor,
                                  shared_bytes);
}

std::string float8_candidates(const std::string& library, const std::string& input, const std::string& out_dtype,
                              const TensorShape& query, const TensorShape& key, const TensorShape& value,
                              const TensorShape& out, bool smooth_keys, int64_t window_left, int64_t window_right,
                              int64_t offset, const std::pair<int, int>& intervals, bool sinks, double scale, double softcap,
                              const std::tuple<int, int, int>& gpu) {
  Float8Problem problem;
  problem.input = dtypes().at(input), problem.smooth_keys = smooth_keys;
  AttentionProblem& attention = problem.attention;
  attention.dtype = dtypes().at(out_dtype);
  const auto size = [](const TensorShape& shape, size_t i) { return std::get<0>(shape)[i]; };
  attention.batch = size(query, 0), attention.heads = size(query, 1), attention.queries = size(query, 2);
  attention.key_heads = attention.value_heads = size(key, 1), attention.keys = size(key, 2);
  attention.head_dim = size(query, 3), attention.head_dim_v = size(value, 3);
  set_view(attention.query, query), set_view(attention.key, key), set_view(attention.value, value);
  set_view(attention.out, out);
  attention.visible = {window_left, window_right, offset};
  attention.scale = scale, attention.softcap = softcap;
  const int32_t start = 0;
  if (sinks) attention.sinks = &start;
  const auto set_spans = [&](SpanView& spans, int count) {
    if (count > 0) spans.data = &start, spans.intervals = count;
  };
  set_spans(attention.query_spans, intervals.first), set_spans(attention.key_spans, intervals.second);
  const auto [major, minor, shared_bytes] = gpu;
  return api_of(library).float8_candidates(problem, major, minor, shared_bytes);
}

auto ranges(int64_t left, int64_t right, int64_t offset, int64_t first, int64_t last, int64_t count) {
  const Visibility visible{left, right, offset};
  const KeyRange keys = keys_of(visible, first, count);
  const QueryRange any = queries_of_any(visible, first, last, count), all = queries_of_all(visible, first, last, count);
  return std::make_tuple(std::make_pair(keys.begin, keys.end), std::make_pair(any.begin, any.end),
                         std::make_pair(all.begin, all.end));
}

}  // namespace
}  // namespace flash_online

PYBIND11_MODULE(_introspect, m) {
  using namespace flash_online;
  m.doc() = "The algebra of online softmax on plain numbers, and the facts of the build.";
  bind_state<float, Natural>(m, "Float32");
  bind_state<double, Natural>(m, "Float64");
  bind_state<float, Binary>(m, "Float32Binary");
  bind_state<double, Binary>(m, "Float64Binary");
  bind_entropy<float, Natural>(m, "Float32Entropy");
  bind_entropy<double, Natural>(m, "Float64Entropy");
  bind_entropy<float, Binary>(m, "Float32BinaryEntropy");
  bind_entropy<double, Binary>(m, "Float64BinaryEntropy");
  m.def(
      "build_info",
      [](const std::string& library) { return py::module_::import("json").attr("loads")(api_of(library).build_info()); },
      py::arg("library"), "The build facts of the library at this path, which is loaded already: a dict.");
  m.def("attention_memory", attention_memory, py::arg("library"), py::arg("dtype"), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("key_strides"), py::arg("value_strides"), py::arg("mask"), py::arg("dropout_p"),
        py::arg("lse_low"), py::arg("threads"),
        "Bytes that attention's forward pass needs on the CPU beyond its results, for inputs [..., heads, length, head_dim] of "
        "these shapes and strides; mask: the mask's dtype, or \"\" for none; lse_low: whether it is computed, for a backward "
        "pass.");
  m.def(
      "attention_candidates", attention_candidates, py::arg("library"), py::arg("dtype"), py::arg("query"), py::arg("key"),
      py::arg("value"), py::arg("out"), py::arg("mask"), py::arg("alibi"), py::arg("sinks"), py::arg("lse_low"),
      py::arg("packed"), py::arg("window_left"), py::arg("window_right"), py::arg("lower_right"), py::arg("scale"),
      py::arg("softcap"), py::arg("dropout_p"), py::arg("tf32"), py::arg("gpu"), py::arg("backward"),
      py::arg("sparsity") = std::make_tuple(false, false, 0), py::arg("max_logit") = false,
      "The CUDA kernels that a call of attention may run on, the best first, one per line: its name and the reason why it does "
      "not take the call, or nothing. Tensors as (sizes, strides, offset in bytes) of [batch, heads, rows, head_dim]; mask: "
      "(dtype, tensor) or None; lse_low: whether it is computed, for a backward pass; packed: the number of sequences and the "
      "maximum lengths of queries and keys, or None; gpu: "
      "compute capability and bytes of shared memory per CTA; backward: (grad_out, deterministic), or None for a forward "
      "pass; sparsity: whether there are spans of queries, whether of keys, and the keys per block of a list of blocks or 0; "
      "max_logit: whether it is computed.");
  m.def("float8_candidates", float8_candidates, py::arg("library"), py::arg("input"), py::arg("out_dtype"), py::arg("query"),
        py::arg("key"), py::arg("value"), py::arg("out"), py::arg("smooth_keys"), py::arg("window_left"),
        py::arg("window_right"), py::arg("offset"), py::arg("intervals"), py::arg("sinks"), py::arg("scale"),
        py::arg("softcap"), py::arg("gpu"),
        "The same for a call of float8_attention; input: the dtype of query, key and value; intervals: those of a row of "
        "query_spans and of key_spans, or 0.");
  m.def(
      "attention_plans", [](const std::string& library) { return api_of(library).attention_plans(); }, py::arg("library"),
      "How many passes of attention this process has planned on CUDA: one per forward or backward pass.");
  m.def(
      "ranges", ranges, py::arg("left"), py::arg("right"), py::arg("offset"), py::arg("first"), py::arg("last"),
      py::arg("count"),
      "Three ranges [begin, end): the keys, out of `count`, that the query `first` sees; the queries, out of `count`, that see "
      "any of the keys [first, last); the queries that see all of them.");
  m.def(
      "row_scratch",
      [](const std::string& library, bool float64, int64_t k) { return api_of(library).row_scratch(float64, k); },
      py::arg("library"), py::arg("float64"), py::arg("k") = 0,
      "Bytes of scratch that one thread of a row operator's forward pass takes on the CPU; k is topk_softmax's.");
}
