// Runs the array of model.h in LiteRT Micro on this computer, row by row, and compares with LiteRT.
//
// On a device this is the same program: the arena is static, nothing is allocated, and model.h and
// the lines `resolver.Add...` are all that it takes of the network.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "model.h"
#include "rows.h"
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"
#include "tensorflow/lite/schema/schema_generated.h"

namespace {

constexpr int kRows = sizeof(rows) / sizeof(rows[0]);
constexpr int kOutputs = sizeof(answers[0]);
// The kernels of LiteRT and of LiteRT Micro round apart by a step.
constexpr int kMostSteps = 1;

alignas(16) uint8_t arena[64 * 1024];

}  // namespace

int main() {
  tflite::MicroMutableOpResolver<5> resolver;  // those that the header lists
  resolver.AddConv2D();
  resolver.AddDecode();
  resolver.AddDepthwiseConv2D();
  resolver.AddFullyConnected();
  resolver.AddMean();

  tflite::MicroInterpreter interpreter(tflite::GetModel(model_data), resolver, arena, sizeof(arena));
  if (interpreter.AllocateTensors() != kTfLiteOk) {
    std::puts("The arena is too small, or an operator is missing.");
    return 1;
  }
  TfLiteTensor* input = interpreter.input(0);
  if (input->bytes != sizeof(rows[0]) || interpreter.output(0)->bytes != kOutputs) {
    std::puts("rows.h is of another model.");
    return 1;
  }

  int largest = 0;
  int same_class = 0;
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(input->data.int8, rows[row], sizeof(rows[row]));
    if (interpreter.Invoke() != kTfLiteOk) {
      std::puts("A call failed.");
      return 1;
    }
    const int8_t* output = interpreter.output(0)->data.int8;
    for (int k = 0; k < kOutputs; ++k) {
      largest = std::max(largest, std::abs(output[k] - answers[row][k]));
    }
    const auto found = std::max_element(output, output + kOutputs) - output;
    const auto expected = std::max_element(answers[row], answers[row] + kOutputs) - answers[row];
    same_class += found == expected;
  }
  std::printf("array: %u bytes, arena: %zu bytes\n", model_data_size, interpreter.arena_used_bytes());
  std::printf("%d of %d rows have LiteRT's class; the largest difference is %d steps\n", same_class,
              kRows, largest);
  return largest <= kMostSteps ? 0 : 1;
}
