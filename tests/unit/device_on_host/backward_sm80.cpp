// The general backward kernels of one head dim on the host, for ctypes, between the pre-pass and the post-passes that they run
// with: test_attention_backward_sm80.py.
#include "sm80.h"

using namespace flash_online;

#include "cuda/attention/common/backward_workspace.cu"
#include "cuda/attention/masks/mask_map.cu"
#include "cuda/attention/masks/span_bounds.cu"
#include "cuda/attention/masks/visible_blocks.cu"
#include "cuda/attention/sm80/backward.cuh"
#include "cuda/attention/sm80/backward_dq.cuh"

using namespace flash_online::cuda;

// Kernels that are not tested here.
namespace flash_online::cuda {
LargeRows::LargeRows(ScratchAllocator<>& scratch, int64_t tiles)
    : marks(scratch.take<uint32_t>(tiles * kWords)), progress(scratch.take<Progress>(1)) {}
void add_large_rows(const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace& space, CUstream_st*) {
  const LargeRows& large = space.large_rows;
  if (large.progress->token == large.token) throw std::logic_error("a row has large scores");
}
int64_t mask_gradient_partials(const AttentionProblem&, const AttentionGradients&) { return 0; }
void mask_gradient(const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, CUstream_st*) {
  throw std::logic_error("the gradient of a mask");
}
}  // namespace flash_online::cuda

static void require_taken(const BackwardPass& pass, int shared_bytes) {
  const Gpu gpu{.major = 8, .minor = 0, .shared_bytes = shared_bytes};
  if (const char* const reason = AttentionBackwardSm80<HEAD_DIM>::refusal(pass, gpu)) throw std::runtime_error(reason);
}

extern "C" {

int64_t size_of_gradients() { return sizeof(AttentionGradients); }

// Whether the kernels take a pass on a GPU that is not there: 0, or -1 with the reason as an error.
int ask_attention_backward(const AttentionProblem* problem, const AttentionGradients* gradients, int deterministic,
                           int shared_bytes) {
  return guarded([&] {
    device_on_host::room = 0;
    require_taken({*problem, *gradients, deterministic != 0}, shared_bytes);
    return 0;
  });
}

// ran: the kind and the keys per tile of the main kernel, and its DqMode. -1 after an error; the reason why the kernels refuse
// a pass is one.
int attention_backward(const AttentionProblem* problem, const AttentionGradients* gradients, int deterministic, int (&ran)[3]) {
  using Kernels = AttentionBackwardSm80<HEAD_DIM>;
  return guarded([&] {
    const BackwardPass pass{*problem, *gradients, deterministic != 0};
    require_taken(pass, device_on_host::room);
    visit_backward_sm80<HEAD_DIM>(
        *problem, [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
          ran[0] = kind_of(kVariant), ran[1] = BackwardSm80Kernel<Element, HEAD_DIM, kVariant>::kKeys;
        });
    ran[2] = static_cast<int>(dq_mode_on_sm80<HEAD_DIM>(*problem, pass.deterministic));
    // What is read before it is written is NaN, and what is written past the end shows.
    struct alignas(16) Vector {
      unsigned char bytes[16];
    };
    constexpr unsigned char kUnwritten = 0xff;
    const auto bytes = static_cast<size_t>(Kernels::workspace_bytes(pass));
    std::vector<Vector> workspace(bytes / sizeof(Vector) + 2);
    std::memset(workspace.data(), kUnwritten, workspace.size() * sizeof(Vector));
    Kernels::run(pass, workspace.data(), nullptr);
    const unsigned char* const end = workspace.data()->bytes + bytes;
    if (std::any_of(end, end + sizeof(Vector), [](unsigned char byte) { return byte != kUnwritten; }))
      throw std::runtime_error("a write past the workspace");
    return 0;
  });
}
}
