// TransformerEngine's fused attention in front of its own, which ends in cudnnCreate: checks what
// it is given, says which auxiliary tensors it keeps (S, rng_state, softmax_offset), computes
// nothing. For the layouts sbhd and thd. TransformerEngine's own library answers all other calls.
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/transformer_engine.h>

#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" void hollow_report(int kind, const char* name, long first, long second);

namespace {

using Shape = std::vector<size_t>;

void check(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("fused attention (stand-in): " + what);
}

// Called by name, and so looked up when called: this library is loaded before TransformerEngine's.
#define GET(pass, type, name) \
  ([&] { \
    type found{}; \
    size_t written = 0; \
    nvte_get_fused_attn_##pass##_params_attribute(params, kNVTEFusedAttn##name, &found, sizeof found, &written); \
    return found; \
  }())

Shape shape_of(NVTETensor tensor) {
  NVTEShape shape = nvte_tensor_shape(tensor);
  return Shape(shape.data, shape.data + shape.ndim);
}

void has(NVTETensor tensor, const Shape& shape, NVTEDType type, const std::string& name) {
  check(tensor && shape_of(tensor) == shape, "shape of " + name);
  check(nvte_tensor_type(tensor) == type, "type of " + name);
  check(reinterpret_cast<uintptr_t>(nvte_tensor_data(tensor)) % 16 == 0, "address of " + name);
}

void set(NVTETensor tensor, const Shape& shape, NVTEDType type) {
  NVTEBasicTensor data{nullptr, type, nvte_make_shape(shape.data(), shape.size())};
  nvte_set_tensor_param(&tensor, kNVTERowwiseData, &data);
}

// What both passes are given.
struct Call {
  Shape query, key, value;
  Shape statistics, offset;
  NVTEDType type;
  bool sink;
  std::string description;
};

Call call_of(NVTETensor q, NVTETensor k, NVTETensor v, NVTETensor ends_q, NVTETensor ends_kv, NVTETensor offsets_q, NVTETensor offsets_kv, size_t queries, size_t keys, NVTE_QKV_Layout layout, NVTE_Softmax_Type softmax, NVTE_Mask_Type mask, int64_t left, int64_t right) {
  const bool packed = layout == NVTE_THD_THD_THD;
  check(packed || layout == NVTE_SBHD_SBHD_SBHD, "layout");
  Call call{shape_of(q), shape_of(k), shape_of(v)};
  const size_t dimensions = packed ? 3 : 4;
  check(call.query.size() == dimensions && call.key.size() == dimensions && call.value.size() == dimensions, "dimensions");
  const size_t heads = call.query[dimensions - 2], groups = call.key[dimensions - 2], width = call.query.back();
  call.type = nvte_tensor_type(q);
  check(call.type == kNVTEBFloat16 || call.type == kNVTEFloat16, "type of q");
  Shape rows_q{queries}, rows_kv{keys};
  size_t sequences = 1;
  if (packed) {
    rows_q[0] = call.query[0], rows_kv[0] = call.key[0], sequences = shape_of(ends_q).at(0) - 1;
    check(queries <= rows_q[0] && queries <= keys && keys <= rows_kv[0], "max_seqlen");
    check(mask == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, "mask");
    has(offsets_q, {sequences + 1}, kNVTEInt32, "cu_seqlens_q_padded");
    has(offsets_kv, {sequences + 1}, kNVTEInt32, "cu_seqlens_kv_padded");
    call.statistics = {rows_q[0], heads, 1};
  } else {
    sequences = call.query[1];
    rows_q.push_back(sequences), rows_kv.push_back(sequences);
    check(mask == NVTE_NO_MASK || mask == (queries == keys ? NVTE_CAUSAL_MASK : NVTE_CAUSAL_BOTTOM_RIGHT_MASK), "mask");
    call.statistics = {sequences, heads, queries, 1};
  }
  auto with = [](Shape rows, size_t heads, size_t width) { return rows.push_back(heads), rows.push_back(width), rows; };
  has(q, with(rows_q, heads, width), call.type, "q");
  has(k, with(rows_kv, groups, width), call.type, "k");
  has(v, with(rows_kv, groups, call.value.back()), call.type, "v");
  check(heads % groups == 0, "groups");
  has(ends_q, {sequences + 1}, kNVTEInt32, "cu_seqlens_q");
  has(ends_kv, {sequences + 1}, kNVTEInt32, "cu_seqlens_kv");
  call.offset = {1, heads, 1, 1};
  call.sink = softmax == NVTE_LEARNABLE_SOFTMAX;
  check(call.sink || softmax == NVTE_VANILLA_SOFTMAX, "softmax_type");
  call.description = std::string(call.sink ? " sink" : "") + (packed ? " packed" : "") + (mask == NVTE_NO_MASK ? "" : " causal");
  call.description += " window " + std::to_string(left) + "," + std::to_string(right);
  return call;
}
#define CALL(pass, Pass) call_of(q, k, v, GET(pass, NVTETensor, Pass##ParamsCuSeqlensQ), GET(pass, NVTETensor, Pass##ParamsCuSeqlensKV), GET(pass, NVTETensor, Pass##ParamsCuSeqlensQPadded), GET(pass, NVTETensor, Pass##ParamsCuSeqlensKVPadded), GET(pass, size_t, Pass##ParamsMaxSeqlenQ), GET(pass, size_t, Pass##ParamsMaxSeqlenKV), GET(pass, NVTE_QKV_Layout, Pass##ParamsQKVLayout), GET(pass, NVTE_Softmax_Type, Pass##ParamsSoftmaxType), GET(pass, NVTE_Mask_Type, Pass##ParamsAttnMaskType), GET(pass, int64_t, Pass##ParamsWindowSizeLeft), GET(pass, int64_t, Pass##ParamsWindowSizeRight))

void launched(const std::string& name) {
  static auto* names = new std::set<std::string>;  // a listener keeps the pointer
  const int launch = 0;
  hollow_report(launch, names->insert(name).first->c_str(), 1, 128);
}

}  // namespace

// Called twice: for the shapes of workspace and auxiliary tensors, and with their memory.
void nvte_fused_attn_fwd_v2(NVTEFusedAttnFwdParams params) {
  auto q = GET(fwd, NVTETensor, FwdParamsQ), k = GET(fwd, NVTETensor, FwdParamsK), v = GET(fwd, NVTETensor, FwdParamsV);
  Call call = CALL(fwd, Fwd);
  Shape out = call.query;
  out.back() = call.value.back();
  has(GET(fwd, NVTETensor, FwdParamsO), out, call.type, "o");
  if (call.sink) has(GET(fwd, NVTETensor, FwdParamsSoftmaxOffset), call.offset, kNVTEFloat32, "softmax_offset");
  auto* kept = GET(fwd, NVTETensorPack*, FwdParamsAuxCtxTensors);
  auto workspace = GET(fwd, NVTETensor, FwdParamsWorkspace);
  if (kept->size == 0) {
    kept->size = call.sink ? 3 : 2;
    set(kept->tensors[0], call.statistics, kNVTEFloat32);
    set(kept->tensors[1], {2}, kNVTEInt64);
    if (call.sink) set(kept->tensors[2], call.offset, kNVTEFloat32);
    set(workspace, {1024}, kNVTEByte);
    return;
  }
  has(workspace, {1024}, kNVTEByte, "workspace");
  has(kept->tensors[0], call.statistics, kNVTEFloat32, "S");
  launched("transformer_engine fused_attn_fwd" + call.description);
}

void nvte_fused_attn_bwd_v2(NVTEFusedAttnBwdParams params) {
  auto q = GET(bwd, NVTETensor, BwdParamsQ), k = GET(bwd, NVTETensor, BwdParamsK), v = GET(bwd, NVTETensor, BwdParamsV);
  Call call = CALL(bwd, Bwd);
  Shape out = call.query;
  out.back() = call.value.back();
  has(GET(bwd, NVTETensor, BwdParamsO), out, call.type, "o");
  has(GET(bwd, NVTETensor, BwdParamsDO), out, call.type, "d_o");
  has(GET(bwd, NVTETensor, BwdParamsDQ), call.query, call.type, "dq");
  has(GET(bwd, NVTETensor, BwdParamsDK), call.key, call.type, "dk");
  has(GET(bwd, NVTETensor, BwdParamsDV), call.value, call.type, "dv");
  auto* kept = GET(bwd, NVTETensorPack*, BwdParamsAuxCtxTensors);
  check(kept->size == (call.sink ? 3u : 2u), "number of aux_ctx_tensors");
  has(kept->tensors[0], call.statistics, kNVTEFloat32, "S");
  has(kept->tensors[1], {2}, kNVTEInt64, "rng_state");
  if (call.sink) {
    has(kept->tensors[2], call.offset, kNVTEFloat32, "softmax_offset");
    has(GET(bwd, NVTETensor, BwdParamsDSoftmaxOffset), call.offset, kNVTEFloat32, "d_softmax_offset");
  }
  auto workspace = GET(bwd, NVTETensor, BwdParamsWorkspace);
  if (nvte_tensor_data(workspace) == nullptr) return set(workspace, {1024}, kNVTEByte);
  launched("transformer_engine fused_attn_bwd" + call.description);
}
