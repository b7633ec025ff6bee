// libacl_tdt_channel.so: data channels between host and device are not simulated. A channel cannot
// be created, so the functions that take one have nothing to work on.
#include "abi/acl_op_abi.h"
#include "abi/acl_rt_abi.h"

struct acltdtChannelHandle;
struct acltdtDataset;
struct acltdtDataItem;

NPU_SIM_EXPORT acltdtChannelHandle* acltdtCreateChannelWithCapacity(uint32_t, const char*, size_t) {
  return nullptr;
}
NPU_SIM_EXPORT aclError acltdtDestroyChannel(acltdtChannelHandle*) {
  return ACL_ERROR_API_NOT_SUPPORT;
}
NPU_SIM_EXPORT acltdtDataset* acltdtCreateDataset() { return nullptr; }
NPU_SIM_EXPORT aclError acltdtDestroyDataset(acltdtDataset*) { return ACL_ERROR_API_NOT_SUPPORT; }
NPU_SIM_EXPORT aclError acltdtReceiveTensor(const acltdtChannelHandle*, acltdtDataset*, int32_t) {
  return ACL_ERROR_API_NOT_SUPPORT;
}
NPU_SIM_EXPORT size_t acltdtGetDatasetSize(const acltdtDataset*) { return 0; }
NPU_SIM_EXPORT acltdtDataItem* acltdtGetDataItem(const acltdtDataset*, size_t) { return nullptr; }
NPU_SIM_EXPORT void* acltdtGetDataAddrFromItem(const acltdtDataItem*) { return nullptr; }
NPU_SIM_EXPORT size_t acltdtGetDataSizeFromItem(const acltdtDataItem*) { return 0; }
NPU_SIM_EXPORT aclDataType acltdtGetDataTypeFromItem(const acltdtDataItem*) {
  return ACL_DT_UNDEFINED;
}
NPU_SIM_EXPORT size_t acltdtGetDimNumFromItem(const acltdtDataItem*) { return 0; }
NPU_SIM_EXPORT aclError acltdtGetDimsFromItem(const acltdtDataItem*, int64_t*, size_t) {
  return ACL_ERROR_API_NOT_SUPPORT;
}
