/* Judges a case of an exported folder by its own expected bytes, for builds with sanitizers.
 *
 *     damaged_index FOLDER CASE              prints the status
 *     damaged_index FOLDER CASE SEED COUNT   damages INDEX.txt COUNT times, from its content each time; prints the counts
 */
#include "fp8_judge.h"

static int judge(const char *folder, const char *name) {
    fp8_case c;
    fp8_verdict verdict;
    const char *names[16], *arches[] = {"sm90", "cpu", NULL};
    const void *bytes[16];
    int64_t sizes[16];
    int i, count = 0, status = FP8_CRASHED;
    if (!fp8_case_open(folder, name, &c)) return FP8_CRASHED;
    for (i = 0; i < c.count && count < 16; i++) {
        const fp8_golden_tensor *t = &c.tensors[i];
        void *copy;
        if (strcmp(t->role, "expected")) continue;
        copy = malloc((size_t)t->bytes); /* of its own, so that a read behind its end is seen */
        memcpy(copy, fp8_case_bytes(&c, t), (size_t)t->bytes);
        if (t->bytes && t->bytes % 7 == 0) ((unsigned char *)copy)[t->bytes - 1] ^= 1;
        names[count] = t->name;
        sizes[count] = t->bytes;
        bytes[count++] = copy;
    }
    for (i = 2; i >= 0; i--) {
        fp8_judge_outputs(&c, arches[i], count, names, bytes, sizes, &verdict);
        status = verdict.status;
    }
    while (count) free((void *)bytes[--count]);
    fp8_case_close(&c);
    return status;
}

static uint64_t next(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* One to four damages: a byte changed, taken away or doubled, a number replaced, two lines exchanged in part. */
static size_t damage(char *text, size_t size, uint64_t *state) {
    static const char *const words[] = {"-1", "0", "9223372036854775807", "9223372036854775808", "4611686018427387904x4", "1x",
                                        "x", "-", "64", "complex64", "bool", "float64", "expected", "free", "low", "\n", "\t"};
    int left = 1 + (int)(next(state) % 4);
    while (left--) {
        size_t at = (size_t)(next(state) % size), length, from;
        const char *word;
        switch (next(state) % 5) {
        case 0: text[at] = (char)next(state); break;
        case 1: memmove(text + at, text + at + 1, --size - at); break;
        case 2: memmove(text + at + 1, text + at, size - at); size++; break;
        case 3: /* a whole field */
            while (at && text[at - 1] != '\t' && text[at - 1] != '\n') at--;
            for (length = 0; at + length < size && text[at + length] != '\t' && text[at + length] != '\n';) length++;
            word = words[next(state) % (sizeof words / sizeof *words)];
            memmove(text + at + strlen(word), text + at + length, size - at - length);
            memcpy(text + at, word, strlen(word));
            size = size - length + strlen(word);
            break;
        default:
            from = (size_t)(next(state) % size);
            length = (size_t)(next(state) % 40);
            if (at + length < size && from + length < size) memmove(text + at, text + from, length);
        }
    }
    return size;
}

int main(int count, char **argument) {
    static char text[1 << 20], changed[(1 << 20) + 1024];
    char path[1024];
    size_t size;
    uint64_t state;
    long i, statuses[5] = {0};
    FILE *file;
    if (count == 3) return puts(fp8_status_name(judge(argument[1], argument[2]))) < 0;
    if (count != 5) return 2;
    snprintf(path, sizeof path, "%s/INDEX.txt", argument[1]);
    if (!(file = fopen(path, "rb"))) return 2;
    size = fread(text, 1, sizeof text, file);
    fclose(file);
    state = strtoull(argument[3], NULL, 10);
    for (i = atol(argument[4]); i; i--) {
        memcpy(changed, text, size);
        if (!(file = fopen(path, "wb"))) return 2;
        fwrite(changed, 1, damage(changed, size, &state), file);
        fclose(file);
        statuses[judge(argument[1], argument[2])]++;
    }
    for (i = 0; i < 5; i++) printf("%s %ld\n", fp8_status_name((int)i), statuses[i]);
    return 0;
}
