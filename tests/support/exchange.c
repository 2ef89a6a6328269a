/* A vendor without Python: reads an exported folder by its index, computes the dense products itself in double, answers
 * every other case with the expected bytes, and writes raw files. Usage: exchange FOLDER ANSWERS [CASE-TO-SPOIL] */
#include "fp8_golden.h"

#include <math.h>

static unsigned char *slice(const char *folder, const fp8_golden_tensor *t) {
    char path[512];
    unsigned char *content = malloc((size_t)(t->bytes ? t->bytes : 1));
    snprintf(path, sizeof path, "%s/data/%s.bin", folder, t->case_name);
    FILE *file = fopen(path, "rb");
    if (!file || !content || fseek(file, (long)t->offset, SEEK_SET) ||
        fread(content, 1, (size_t)t->bytes, file) != (size_t)t->bytes) {
        fprintf(stderr, "cannot read %s of %s\n", t->name, path);
        exit(1);
    }
    fclose(file);
    return content;
}

static double e4m3(unsigned char code) {
    int exponent = code >> 3 & 15, fraction = code & 7;
    if (exponent == 15 && fraction == 7) return NAN;
    double value = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 128 ? -value : value;
}

static uint16_t bfloat16(double x) {
    float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (isnan(single)) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* a [M, K], b [N, K], scales of 1x128 and 128x128. */
static void multiply(const char *folder, const fp8_golden_tensor t[4], unsigned char *out) {
    unsigned char *a = slice(folder, &t[0]), *b = slice(folder, &t[2]);
    float *sa = (float *)slice(folder, &t[1]), *sb = (float *)slice(folder, &t[3]);
    int64_t m = t[0].shape[0], k = t[0].shape[1], n = t[2].shape[0], blocks = t[1].shape[1];
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double total = 0;
            for (int64_t l = 0; l < blocks; l++) {
                double part = 0;
                for (int64_t x = 128 * l; x < 128 * (l + 1) && x < k; x++) part += e4m3(a[i * k + x]) * e4m3(b[j * k + x]);
                total += part * sa[i * blocks + l] * sb[j / 128 * blocks + l];
            }
            uint16_t code = bfloat16(total);
            memcpy(out + 2 * (i * n + j), &code, 2);
        }
    free(a); free(b); free(sa); free(sb);
}

int main(int count, char **arguments) {
    char path[600], line[1024];
    static const char *names[4] = {"a", "a_scale", "b", "b_scale"};
    fp8_golden_tensor t, operands[4];
    int tensors = 0, computed = 0;
    if (count < 3) return 1;
    snprintf(path, sizeof path, "%s/INDEX.txt", arguments[1]);
    FILE *index = fopen(path, "r");
    if (!index) return 1;
    while (fgets(line, sizeof line, index)) {
        int kind = fp8_golden_parse(line, &t);
        if (kind < 0) { fprintf(stderr, "malformed: %s", line); return 1; }
        if (kind == 0) continue;
        tensors++;
        for (int i = 0; i < 4; i++) if (!strcmp(t.name, names[i])) operands[i] = t;
        if (strcmp(t.role, "expected")) continue;
        unsigned char *content = slice(arguments[1], &t);
        if (!strncmp(t.case_name, "fp8_gemm_nt-", 12)) {
            memset(content, 0, (size_t)t.bytes);
            multiply(arguments[1], operands, content);
            computed++;
        }
        if (count > 3 && !strcmp(arguments[3], t.case_name)) content[1] ^= 64;
        snprintf(path, sizeof path, "%s/%s.%s.bin", arguments[2], t.case_name, t.name);
        FILE *answer = fopen(path, "wb");
        if (!answer || fwrite(content, 1, (size_t)t.bytes, answer) != (size_t)t.bytes || fclose(answer)) return 1;
        free(content);
    }
    fclose(index);
    printf("%d tensors read, %d products computed\n", tensors, computed);
    return 0;
}
